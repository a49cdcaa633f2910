"""A NaN on a GPU: the update is left out without the host knowing, which learns of it a step later."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.tiny import replaced, tiny_recipe
from training import model as models
from training.config import JobConfig
from training.events import read_events
from training.faults import FaultPlan
from training.layout import local_tensors
from training.restart import Attempt, close_group, open_group
from training.trainer import Trainer
from training.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]
BAD_STEP = 7


@pytest.fixture
def nan_once(monkeypatch: pytest.MonkeyPatch) -> None:
    left = 1

    def in_forward(self: FaultPlan, loss: Tensor, *, step: int) -> Tensor:
        nonlocal left
        if step != BAD_STEP or not left:
            return loss
        left -= 1
        return loss * float("nan")

    monkeypatch.setattr(FaultPlan, "in_forward", in_forward)


def recipe(data: Path, policy: str) -> JobConfig:
    config = tiny_recipe(data, checkpoint={"writer": "holdfast", "every_steps": 100})
    config = replaced(config, "training", device="cuda", steps=12, non_finite_loss=policy, deterministic=True)
    return replaced(config, "recovery", layers="none")


def trained(config: JobConfig, run_dir: Path) -> dict[str, Tensor]:
    """Train to the end and return the state."""
    worker = Worker(config, run_dir)
    open_group(worker.device, iteration=0, config=config.recovery)
    trainer: Trainer = worker.make_trainer()
    try:
        trainer.train(Attempt())
        return {name: tensor.cpu() for name, tensor in local_tensors(trainer.state.tensors()).items()}
    finally:
        trainer.close()
        worker.close()
        close_group()


@pytest.mark.usefixtures("nan_once")
def test_skipping_waits_for_nothing(data: Path, tmp_path: Path) -> None:
    config = recipe(data, "skip")
    worker = Worker(config, tmp_path)
    open_group(worker.device, iteration=0, config=config.recovery)
    trainer = worker.make_trainer()
    parameter = next(iter(trainer.state.parameters.values()))
    try:
        with models.no_packed_sequence_check():
            for _ in range(BAD_STEP - 1):
                trainer.run_step()
            before = parameter.detach().clone()
            torch.cuda.set_sync_debug_mode("error")
            trainer.run_step()
            after = parameter.detach().clone()
            trainer.run_step()
        torch.cuda.set_sync_debug_mode("default")
        assert torch.equal(before.to_local(), after.to_local())  # type: ignore[attr-defined]
        assert not torch.equal(after.to_local(), parameter.detach().to_local())  # type: ignore[attr-defined]
        counts = {float(moments["step"]) for moments in trainer.state.optimizer.state.values()}
        assert counts == {BAD_STEP + 1.0}
    finally:
        torch.cuda.set_sync_debug_mode("default")
        trainer.close()
        worker.close()
        close_group()
    [found] = [event for event in read_events(tmp_path) if event["event"] == "non_finite"]
    assert (found["step"], found["action"]) == (BAD_STEP, "skip")


def test_roll_back_ends_with_the_undisturbed_bits(
    data: Path, tmp_path: Path, request: pytest.FixtureRequest
) -> None:
    config = recipe(data, "roll_back")
    whole = trained(config, tmp_path / "whole")
    request.getfixturevalue("nan_once")
    rolled_back = trained(config, tmp_path / "rolled_back")
    assert all(torch.equal(whole[name], rolled_back[name]) for name in whole)
    restored = [e["step"] for e in read_events(tmp_path / "rolled_back") if e["event"] == "restored"]
    assert len(restored) == 1
    assert restored[0] < BAD_STEP
