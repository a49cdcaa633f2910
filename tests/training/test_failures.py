"""The breaker alone, and under the real launcher with each restart layer."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest
import torch
import torch.distributed as dist

from tests.ranks import RankFailed, run_ranks
from tests.tiny import tiny_recipe, train_rank
from training import environment
from training.config import JobConfig
from training.errors import EXIT_SAME_STEP, ConfigError
from training.events import read_events
from training.failures import Breaker, SameStepError
from training.ledger import Consumed, consumed

ROOT = Path(__file__).parents[2]
RECIPE = """
version = 1
job = {{ name = "fails" }}
model = {{ config = {{ model_type = "llama" }} }}
data = {{ path = "unused", sequence_length_tokens = 8, global_batch_samples = 1 }}
training = {{ steps = 5, device = "cpu" }}
[recovery]
layers = "{layers}"
group_timeout_seconds = 10.0
"""
LAUNCH = """
import sys
from pathlib import Path
from training.config import load_recipe
from training.launch import launch
recipe, run_dir, program = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3:]
worker = [sys.executable, *program, str(recipe), str(run_dir)]
sys.exit(launch(load_recipe(recipe), recipe=recipe, run_dir=run_dir, worker=worker))
"""


BEFORE_FIRST_ATTEMPT = """
import sys
from training import __main__ as program
from training import worker

def fail(*_):
    raise ValueError("no such module")

worker.open_stores = fail
sys.exit(program.main(["run", sys.argv[1], "--run-dir", sys.argv[2]]))
"""


@pytest.mark.timeout(300)
def test_rank_that_never_gets_to_its_first_attempt_ends_the_run_with_65(tmp_path: Path) -> None:
    """GIVEN a rank that raises while it is made THEN the in-job layer does not restart it for ever."""
    done = launch(tmp_path, "in_job", "-c", BEFORE_FIRST_ATTEMPT)
    assert done.returncode == EXIT_SAME_STEP, done.stderr
    assert "rank 0 failed as often in set-up or the first step with ValueError: no such module" in done.stderr


def launch(directory: Path, layers: str, *program: str) -> subprocess.CompletedProcess[str]:
    """Run the real launcher over a program that is one rank."""
    recipe, run_dir = directory / "recipe.toml", directory / "run"
    recipe.write_text(RECIPE.format(layers=layers))
    environ = {**os.environ, "PYTHONPATH": str(ROOT), environment.WARM_WORKERS: "0"}
    command = [sys.executable, "-c", LAUNCH, str(recipe), str(run_dir), *program]
    return subprocess.run(command, env=environ, capture_output=True, text=True, timeout=280, check=False)


@pytest.mark.timeout(300)
@pytest.mark.parametrize("layers", ["in_process", "in_job", "both"])
def test_step_that_always_fails_ends_the_run_with_65(tmp_path: Path, layers: str) -> None:
    done = launch(tmp_path, layers, "-m", "tests.training.failing_rank")
    assert done.returncode == EXIT_SAME_STEP, done.stderr
    assert "rank 0 failed as often in step 3 with ValueError: sample of process" in done.stderr
    assert "failing_rank.py:" in done.stderr
    events = read_events(tmp_path / "run")
    raised = [event for event in events if event["event"] == "exception"]
    assert [event["step"] for event in raised] == [3, 3, 3]
    assert len({event["pid"] for event in raised}) == (3 if layers == "in_job" else 1)


def fail(breaker: Breaker, error: Exception, *, step: int | None = 3) -> None:
    with pytest.raises(type(error)):
        raise error
    breaker.failed(error, step=step)


def make(run_dir: Path, *, maximum: int = 2) -> Breaker:
    return Breaker(run_dir, rank=1, maximum=maximum, log=run_dir / "events.jsonl")


def test_count_survives_the_process_and_numbers_in_messages_do_not_matter(tmp_path: Path) -> None:
    fail(make(tmp_path), ValueError("loss 1.5 at 0xabc"))
    assert json.loads((tmp_path / "failures" / "rank-1.json").read_text())["count"] == 1
    with pytest.raises(SameStepError, match=r"rank 1 failed as often in step 3 with ValueError: loss 7\.25"):
        fail(make(tmp_path), ValueError("loss 7.25 at 0xdef"))


@pytest.mark.parametrize(
    ("error", "step"), [(ValueError("other"), 3), (KeyError("same"), 3), (ValueError("same"), 4)]
)
def test_another_failure_starts_a_new_count(tmp_path: Path, error: Exception, step: int) -> None:
    breaker = make(tmp_path)
    fail(breaker, ValueError("same"))
    fail(breaker, error, step=step)
    with pytest.raises(SameStepError):
        fail(breaker, error, step=step)


@pytest.mark.parametrize(("done", "forgotten"), [(2, False), (3, False), (4, True)])
def test_only_a_later_step_clears_the_count(tmp_path: Path, done: int, *, forgotten: bool) -> None:
    fail(make(tmp_path), ValueError("same"))
    make(tmp_path).succeeded(done)
    assert (tmp_path / "failures" / "rank-1.json").exists() != forgotten


def test_any_step_clears_a_failure_before_the_first(tmp_path: Path) -> None:
    breaker = make(tmp_path)
    fail(breaker, OSError("no"), step=None)
    breaker.succeeded(1)
    fail(breaker, OSError("no"), step=None)


def wrong_collective() -> None:
    dist.all_reduce(torch.ones(()))  # raises ValueError: there is no group


def lost_peer() -> None:
    raise RuntimeError("[../gloo/transport/tcp/pair.cc:553] Connection closed by peer [127.0.0.1]:1")


def lost_store() -> None:
    raise dist.DistNetworkError("failed to recv")


def wrong_setting() -> None:
    raise ConfigError.of("a", 1, "is wrong", "mend it")


def broken_device() -> None:
    raise torch.AcceleratorError("CUDA error: uncorrectable ECC error", 214)


@pytest.mark.parametrize("cause", [wrong_collective, lost_peer, lost_store, wrong_setting, broken_device])
def test_what_another_rank_or_the_machine_may_have_caused_is_not_counted(
    tmp_path: Path, cause: Callable[[], None]
) -> None:
    breaker = make(tmp_path, maximum=1)
    with pytest.raises((RuntimeError, ValueError, ConfigError)) as caught:
        cause()
    breaker.failed(caught.value, step=3)
    assert not (tmp_path / "failures").exists()


def test_runtime_error_of_our_own_is_counted(tmp_path: Path) -> None:
    with pytest.raises(SameStepError):
        fail(make(tmp_path, maximum=1), RuntimeError("shapes do not fit"))


def fail_in_step_3(config: JobConfig, run_dir: Path) -> None:
    """Be a rank whose forward pass fails."""
    from training.faults import FaultPlan

    def in_forward(self: FaultPlan, loss: torch.Tensor, *, step: int) -> torch.Tensor:
        if step == 3:
            raise ValueError("bad sample")
        return loss

    FaultPlan.in_forward = in_forward  # type: ignore[method-assign]
    train_rank(config, run_dir)


def test_evidence_names_rank_step_samples_place_and_log(data: Path, tmp_path: Path) -> None:
    config = tiny_recipe(data, recovery={"maximum_same_step_failures": 1})
    with pytest.raises(RankFailed) as caught:
        run_ranks(1, fail_in_step_3, config, tmp_path)
    evidence = json.loads((tmp_path / "failures" / "rank-0.json").read_text())
    [raised] = [event for event in read_events(tmp_path) if event["event"] == "exception"]
    [fed] = [entry.ids for entry in ledger_of(config, tmp_path) if entry.step == 3]
    place, samples = evidence["details"]
    assert samples == f"samples {list(fed)} from position 16"
    assert raised["notes"] == [samples]
    assert "test_failures.py:" in place
    assert Path(evidence["log"]).is_file()
    assert (evidence["rank"], evidence["step"], evidence["said"]) == (0, 3, "bad sample")
    assert f"ValueError: bad sample ({place}; {samples}); log: {evidence['log']}" in str(caught.value)


def ledger_of(config: JobConfig, run_dir: Path) -> list[Consumed]:
    """Return what a run of the recipe that does not fail is fed with."""
    run_ranks(1, train_rank, config, run_dir / "whole")
    return consumed(run_dir / "whole")
