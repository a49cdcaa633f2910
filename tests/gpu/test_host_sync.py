"""A training step on a GPU must not wait for the device: behind a snapshot in flight that doubles it."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.tiny import replaced, tiny_recipe
from training import model as models
from training.restart import close_group, open_group
from training.worker import Worker

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.filterwarnings("ignore:Synchronization debug mode is a prototype feature"),
]


def test_steps_and_snapshots_have_no_host_sync(data: Path, tmp_path: Path) -> None:
    config = tiny_recipe(data, checkpoint={"writer": "holdfast", "every_steps": 2})
    config = replaced(config, "training", device="cuda", steps=12)
    config = replaced(config, "recovery", layers="none")
    worker = Worker(config, tmp_path)
    open_group(worker.device, iteration=0, config=config.recovery)
    trainer = worker.make_trainer()
    try:
        with models.no_packed_sequence_check():
            for _ in range(4):  # allocations and lazy set-up of the first steps may wait
                trainer.run_step()
            torch.cuda.set_sync_debug_mode("error")
            for _ in range(6):
                trainer.run_step()
    finally:
        torch.cuda.set_sync_debug_mode("default")
        trainer.close()
        worker.close()
        close_group()
