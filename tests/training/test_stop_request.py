"""SIGTERM while training: all ranks park at one step, its state is durable, and no step is lost."""

from __future__ import annotations

import dataclasses
import json
import os
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import run_ranks
from tests.tiny import llama_fields, step_losses, tiny_recipe, train_rank
from training import commit, environment
from training.config import JobConfig, load_recipe
from training.errors import EXIT_STOPPED
from training.events import read_events
from training.fingerprint import fingerprint, load_full, newest_checkpoint

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(400)
STEPS = 120
RECIPE = """
version = 1
job = {{ name = "parks", ranks_per_node = 2 }}
model = {{ config = {model} }}
data = {{ path = "{data}", sequence_length_tokens = 32, global_batch_samples = 8 }}
training = {{ steps = {steps}, device = "cpu" }}
checkpoint = {{ every_steps = 1000, deadline_seconds = 60.0 }}
snapshot = {{ every_steps = 1 }}
recovery = {{ layers = "{layers}", group_timeout_seconds = 20.0 }}
"""


def run_with_sigterm(config: JobConfig, run_dir: Path, grace_seconds: int) -> int:
    """Be a rank; rank 1, and no other, is told to stop during step 3."""
    from training.faults import FaultPlan
    from training.process_group import rank_and_world
    from training.worker import Worker

    os.environ[environment.GRACE_SECONDS] = str(grace_seconds)

    def in_step(self: FaultPlan, point: str, *, step: int) -> None:
        if (rank_and_world()[0], point, step) == (1, "backward", 3):
            os.kill(os.getpid(), signal.SIGTERM)

    FaultPlan.in_step = in_step  # type: ignore[method-assign]
    return Worker(config, run_dir).run()


def run_with_sigterm_and_a_disk_that_hangs(config: JobConfig, run_dir: Path, grace_seconds: int) -> int:
    """Be a rank; every worker that copies to rank 0's disk hangs."""
    from training.drain_worker import DrainWorker
    from training.process_group import rank_and_world

    start = DrainWorker._start

    def start_and_hang(self: DrainWorker) -> None:
        start(self)
        if self._what == "local copy" and rank_and_world()[0] == 0:
            os.kill(self._queue.persistent_caller.process.pid, signal.SIGSTOP)

    DrainWorker._start = start_and_hang  # type: ignore[method-assign]
    return run_with_sigterm(config, run_dir, grace_seconds)


def parked(run_dir: Path) -> list[tuple[int, int, bool]]:
    found = [event for event in read_events(run_dir) if event["event"] == "parked"]
    return sorted((event["rank"], event["step"], event["durable"]) for event in found)


def checkpoints(run_dir: Path) -> list[int]:
    return [commit.step_of(path) for path in commit.committed_checkpoints(run_dir / "checkpoints")]


def final_fingerprint(run_dir: Path) -> str:
    return fingerprint(load_full(newest_checkpoint(run_dir)))


@pytest.mark.parametrize("writer", ["holdfast", "dcp_sync"])
def test_one_rank_that_is_told_parks_them_all(data: Path, tmp_path: Path, writer: str) -> None:
    config = tiny_recipe(data, ranks=2, checkpoint={"writer": writer, "every_steps": 100})
    assert run_ranks(2, run_with_sigterm, config, tmp_path / "run", 60) == [EXIT_STOPPED] * 2
    assert parked(tmp_path / "run") == [(0, 3, True), (1, 3, True)]
    assert checkpoints(tmp_path / "run") == [3]
    # WHEN it is started again, and its memory is gone
    shutil.rmtree(environment.shared_memory() / "holdfast")
    run_ranks(2, train_rank, config, tmp_path / "run")
    # THEN it goes on after that step, to the same bits
    [restored] = [e for e in read_events(tmp_path / "run") if e["event"] == "restored" and e["rank"] == 0]
    assert (restored["source"], restored["step"]) == ("durable", 3)
    run_ranks(2, train_rank, config, tmp_path / "whole")
    assert final_fingerprint(tmp_path / "run") == final_fingerprint(tmp_path / "whole")
    assert step_losses(tmp_path / "run") == step_losses(tmp_path / "whole")


def test_memory_is_kept_where_the_grace_allows_no_save(data: Path, tmp_path: Path) -> None:
    config = tiny_recipe(data, ranks=2, checkpoint={"writer": "holdfast", "every_steps": 100})
    assert run_ranks(2, run_with_sigterm, config, tmp_path, 1) == [EXIT_STOPPED] * 2
    assert parked(tmp_path) == [(0, 3, False), (1, 3, False)]
    assert checkpoints(tmp_path) == []
    run_ranks(2, train_rank, config, tmp_path)
    [restored] = [e for e in read_events(tmp_path) if e["event"] == "restored" and e["rank"] == 0]
    assert (restored["source"], restored["step"]) == ("memory", 3)


@pytest.mark.parametrize("every_steps", [2, 100])
def test_a_disk_that_hangs_leaves_the_grace_to_the_durable_save(
    data: Path, tmp_path: Path, every_steps: int
) -> None:
    """GIVEN a copy that hangs, with or without a durable save that waits for it THEN parking does not."""
    local = {"directory": str(tmp_path / "disk"), "every_steps": 2}
    checkpoint = {"writer": "holdfast", "every_steps": every_steps, "overlap": "defer", "local": local}
    config = tiny_recipe(data, ranks=2, checkpoint=checkpoint)
    ended = run_ranks(2, run_with_sigterm_and_a_disk_that_hangs, config, tmp_path / "run", 24)
    assert ended == [EXIT_STOPPED] * 2
    assert parked(tmp_path / "run") == [(0, 3, True), (1, 3, True)]
    assert checkpoints(tmp_path / "run")[0] == 3
    [told] = [e for e in read_events(tmp_path / "run") if e["event"] == "local_copy" and e["rank"] == 0]
    assert (told["status"], told["reason"]) == ("failed", "was given up")


@pytest.mark.parametrize("layers", ["both"])
def test_launch_that_is_told_to_stop_loses_no_step(data: Path, tmp_path: Path, layers: str) -> None:
    recipe, run_dir = tmp_path / "recipe.toml", tmp_path / "run"
    fields = json.dumps(llama_fields()).replace('":', '" =')
    recipe.write_text(RECIPE.format(model=fields, data=data, steps=STEPS, layers=layers))
    # GIVEN a run that process 1 is told to stop in its middle
    launched = launch(recipe, run_dir)
    step = wait_for_step(run_dir, 20, launched)
    launched.send_signal(signal.SIGTERM)
    assert launched.wait(120) == EXIT_STOPPED, (tmp_path / "log").read_text()
    [(_, parked_at, durable), other] = parked(run_dir)
    assert (other, durable) == ((1, parked_at, True), True)
    assert step <= parked_at < STEPS
    assert checkpoints(run_dir) == [parked_at]
    assert max(event["step"] for event in read_events(run_dir) if event["event"] == "step") == parked_at
    # WHEN it is launched again without its memory
    shutil.rmtree(environment.shared_memory() / "holdfast")
    assert launch(recipe, run_dir).wait(200) == 0, (tmp_path / "log").read_text()
    # THEN it has gone on at that step, and ends as a run that nobody has disturbed
    [restored] = [e for e in read_events(run_dir) if e["event"] == "restored" and e["rank"] == 0]
    assert (restored["source"], restored["step"]) == ("durable", parked_at)
    config = load_recipe(recipe)
    alone = dataclasses.replace(config.recovery, layers="none")
    run_ranks(2, train_rank, dataclasses.replace(config, recovery=alone), tmp_path / "whole")
    assert final_fingerprint(run_dir) == final_fingerprint(tmp_path / "whole")


def launch(recipe: Path, run_dir: Path) -> subprocess.Popen[bytes]:
    environ: dict[str, Any] = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "training", "launch", str(recipe), "--run-dir", str(run_dir)]
    with (recipe.parent / "log").open("ab") as log:
        return subprocess.Popen(command, env=environ, stdout=log, stderr=log)


def wait_for_step(run_dir: Path, step: int, process: subprocess.Popen[bytes]) -> int:
    while process.poll() is None:
        done = [event["step"] for event in read_events(run_dir) if event["event"] == "step"]
        if done and max(done) >= step:
            return int(max(done))
        time.sleep(0.1)
    raise AssertionError(f"launch ended with {process.returncode}")
