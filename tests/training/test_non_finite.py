"""A NaN in one rank's loss, by each policy; judged bitwise against runs that never saw one."""

from __future__ import annotations

import json
import math
import os
import signal
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn

from tests.ranks import RankFailed, run_ranks
from tests.tiny import replaced, step_losses, tiny_recipe, train_rank
from training.commit import committed_checkpoints
from training.config import JobConfig
from training.data import Batch
from training.events import EventLog, read_events
from training.fingerprint import fingerprint, load_full, newest_checkpoint
from training.ledger import consumed
from training.metrics import Reading
from training.non_finite import MAXIMUM_SKIPPED_IN_A_ROW, NonFiniteGuard, NonFiniteLossError, update_on_device

pytestmark = pytest.mark.timeout(300)
BAD_STEP = 3


def recipe(data: Path, policy: str) -> JobConfig:
    return replaced(tiny_recipe(data, ranks=2), "training", non_finite_loss=policy)


def train_with_nan(config: JobConfig, run_dir: Path, times: int) -> None:
    """Be a rank; the loss of rank 1 is NaN the first `times` that step 3 is done."""
    from training.faults import FaultPlan
    from training.process_group import rank_and_world

    left = times if rank_and_world()[0] == 1 else 0

    def in_forward(self: FaultPlan, loss: Tensor, *, step: int) -> Tensor:
        nonlocal left
        if step != BAD_STEP or not left:
            return loss
        left -= 1
        return loss * float("nan")

    FaultPlan.in_forward = in_forward  # type: ignore[method-assign]
    train_rank(config, run_dir)


def train_without_update(config: JobConfig, run_dir: Path) -> None:
    """Be a rank that leaves out the update of step 3, by other means than the trainer's."""
    from training import trainer

    module: Any = trainer
    update: Callable[..., None] = module.update_if_finite
    steps = 0

    def left_out(optimizer: torch.optim.Optimizer, is_finite: Tensor) -> None:
        nonlocal steps
        steps += 1
        if steps != BAD_STEP:
            update(optimizer, is_finite)
            return
        for state in optimizer.state.values():
            state["step"] += 1

    module.update_if_finite = left_out
    train_rank(config, run_dir)


def final_fingerprint(run_dir: Path) -> str:
    return fingerprint(load_full(newest_checkpoint(run_dir)))


def events_of(run_dir: Path, kind: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == kind]


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed") / "run"
    run_ranks(2, train_rank, recipe(data, "stop"), run_dir)
    return run_dir


def test_skip_leaves_the_update_out_on_all_ranks(data: Path, tmp_path: Path) -> None:
    config = recipe(data, "skip")
    run_ranks(2, train_with_nan, config, tmp_path / "skipped", 1)
    run_ranks(2, train_without_update, config, tmp_path / "expected")
    assert final_fingerprint(tmp_path / "skipped") == final_fingerprint(tmp_path / "expected")
    found = {event["rank"]: event for event in events_of(tmp_path / "skipped", "non_finite")}
    assert {rank: (event["step"], event["action"], event["skipped"]) for rank, event in found.items()} == {
        0: (BAD_STEP, "skip", 1),
        1: (BAD_STEP, "skip", 1),
    }
    # it is told whose loss it was
    assert (found[0]["own_loss"] != "nan", found[1]["own_loss"]) == (True, "nan")
    assert BAD_STEP not in step_losses(tmp_path / "skipped")


def test_roll_back_does_the_step_again(data: Path, tmp_path: Path, undisturbed: Path) -> None:
    run_ranks(2, train_with_nan, recipe(data, "roll_back"), tmp_path, 1)
    assert final_fingerprint(tmp_path) == final_fingerprint(undisturbed)
    assert step_losses(tmp_path) == step_losses(undisturbed)
    restored = [(e["source"], e["step"]) for e in events_of(tmp_path, "restored") if e["rank"] == 0]
    assert restored == [("memory", BAD_STEP - 1)]
    assert len(events_of(tmp_path, "non_finite")) == 2
    # every sample of the order is consumed once along the surviving line
    assert [entry.position for entry in consumed(tmp_path) if entry.rank == 1] == [0, 8, 16, 24, 32, 40]


def die_before_going_back(config: JobConfig, run_dir: Path, is_late: bool) -> None:
    """Be a rank that is killed when it has learned of the NaN, and its saves have ended.

    Args:
        is_late: Learn of it one step later, as on a GPU.
    """
    from training.metrics import MetricsQueue, StepMetrics, _read
    from training.trainer import Trainer

    def push(self: MetricsQueue, metrics: StepMetrics) -> Reading | None:
        previous, self._unread = self._unread, metrics
        return _read(previous) if previous else None

    def heed(self: Trainer, attempt: object) -> None:
        if self._guard._bad is not None:
            self._checkpointer._let_writer_end(math.inf)
            os.kill(os.getpid(), signal.SIGKILL)

    if is_late:
        MetricsQueue.push = push  # type: ignore[method-assign]
    Trainer._heed_metrics = heed  # type: ignore[method-assign]
    train_with_nan(config, run_dir, 1)


@pytest.mark.parametrize("is_late", [False, True])
@pytest.mark.parametrize("writer", ["holdfast", "dcp_sync"])
def test_fault_before_going_back_leaves_nothing_of_the_bad_step(
    data: Path, tmp_path: Path, undisturbed: Path, writer: str, is_late: bool
) -> None:
    """GIVEN states past a bad step in memory, on disk and on their way to storage THEN none is ever used."""
    run_dir = tmp_path / "run"
    local = {"directory": str(tmp_path / "disk"), "every_steps": 1} if writer == "holdfast" else {}
    checkpoint = {"writer": writer, "every_steps": 1, "keep": 2, "local": local}
    config = replaced(
        tiny_recipe(data, ranks=2, checkpoint=checkpoint), "training", non_finite_loss="roll_back"
    )
    with pytest.raises(RankFailed, match="exit code -9"):
        run_ranks(2, die_before_going_back, config, run_dir, is_late)
    assert {path.name for path in committed_checkpoints(run_dir / "checkpoints")} == {
        "step-00000001",
        "step-00000002",
    }
    run_ranks(2, train_rank, config, run_dir)
    restored = {(e["source"], e["step"]) for e in events_of(run_dir, "restored")}
    assert restored == {("memory", BAD_STEP - 1)}
    assert final_fingerprint(run_dir) == final_fingerprint(undisturbed)


@pytest.mark.parametrize(
    ("policy", "message", "times"),
    [
        ("stop", r"non_finite_loss='stop': rank \d, step 3: loss nan.*with samples \[.*log: .*jsonl", 1),
        ("roll_back", r"rank \d failed as often in step 3 with non-finite loss: step 3: loss nan", 3),
    ],
)
def test_stopped_run_resumes_before_the_bad_step(
    data: Path, tmp_path: Path, undisturbed: Path, policy: str, message: str, times: int
) -> None:
    config = recipe(data, policy)
    with pytest.raises(RankFailed, match=message):
        run_ranks(2, train_with_nan, config, tmp_path, 9)
    assert len([e for e in events_of(tmp_path, "non_finite") if e["rank"] == 1]) == times
    # GIVEN that the cause is mended WHEN it is started again
    run_ranks(2, train_rank, config, tmp_path)
    # THEN nothing of the bad step is left
    assert final_fingerprint(tmp_path) == final_fingerprint(undisturbed)


def test_roll_backs_are_counted_beyond_the_process(data: Path, tmp_path: Path) -> None:
    config = recipe(data, "roll_back")
    with pytest.raises(RankFailed):
        run_ranks(2, train_with_nan, config, tmp_path, 9)
    counted = json.loads((tmp_path / "failures" / "rank-1.json").read_text())
    assert (counted["step"], counted["count"]) == (BAD_STEP, 3)
    with pytest.raises(RankFailed, match="failed as often in step 3"):
        run_ranks(2, train_with_nan, config, tmp_path, 1)


def test_endless_skipping_ends(tmp_path: Path) -> None:
    with EventLog(tmp_path, role="rank", node="node-0", rank=0) as events:
        guard = NonFiniteGuard("skip", events=events)
        for step in range(1, MAXIMUM_SKIPPED_IN_A_ROW):
            assert not guard.accepts(reading(step, loss=float("inf")))
        with pytest.raises(NonFiniteLossError, match="20 steps in a row were skipped"):
            guard.accepts(reading(MAXIMUM_SKIPPED_IN_A_ROW, loss=float("inf")))


def reading(step: int, *, loss: float) -> Reading:
    import numpy as np

    batch = Batch(position=0, sample_ids=np.arange(2), tokens=torch.zeros(1), checksum=0)
    return Reading(
        step=step, batch=batch, loss_sum=loss, gradient_norm=1.0, own_loss_sum=loss, signals=(0.0,)
    )


def local(parameter: Any) -> Tensor:
    shard: Tensor = parameter.to_local()
    return shard


def update_shards() -> None:
    """Update a sharded layer by the fused optimizer, as on a GPU: finite, not finite, finite."""
    from torch.distributed.fsdp import fully_shard

    from training.config import OptimizerConfig, RecoveryConfig
    from training.process_group import close_group, open_group
    from training.state import make_state

    open_group(torch.device("cpu"), iteration=0, config=RecoveryConfig(group_timeout_seconds=20.0))
    for fused in (True, False):
        torch.manual_seed(0)
        layer: Any = fully_shard(nn.Linear(8, 8))
        state = make_state(layer, OptimizerConfig(), device=torch.device("cpu"))
        for group in state.optimizer.param_groups:
            group["fused"] = fused
        shards = [local(parameter) for parameter in state.parameters.values()]
        for finite in (True, False, True):
            layer(torch.ones(2, 8)).sum().backward()
            before = [shard.clone() for shard in shards]
            if fused:
                update_on_device(state.optimizer, torch.tensor(finite))
            elif finite:
                state.optimizer.step()
            state.optimizer.zero_grad()
            changed = [not torch.equal(a, b) for a, b in zip(before, shards, strict=True)]
            assert changed == [finite] * len(shards)
        counts = {float(moments["step"]) for moments in state.optimizer.state.values()}
        assert counts == ({3.0} if fused else {2.0})
    close_group()


def test_fused_optimizer_leaves_the_update_out_on_the_device() -> None:
    run_ranks(2, update_shards)
