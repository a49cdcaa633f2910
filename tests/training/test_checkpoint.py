"""Asynchronous saves by real workers: what survives kills, damage and failing storage."""

from __future__ import annotations

import os
import signal
import time
from pathlib import Path
from typing import Any

import pytest
from torch import Tensor

from tests.ranks import RankFailed, Ranks, is_alive, run_ranks
from tests.tiny import replaced, step_losses, tiny_recipe, train_rank
from training import commit
from training.config import JobConfig
from training.events import read_events
from training.fingerprint import fingerprint, load_full, newest_checkpoint
from training.slots import Mark


def async_recipe(data: Path, *, ranks: int = 2, steps: int = 6) -> JobConfig:
    return tiny_recipe(data, ranks=ranks, training={"steps": steps}, checkpoint={"writer": "holdfast"})


def final_fingerprint(run_dir: Path) -> str:
    return fingerprint(load_full(newest_checkpoint(run_dir)))


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run_ranks(2, train_rank, async_recipe(data), run_dir)
    return run_dir


def wait_for(root: Path, pattern: str, timeout_seconds: float = 60.0) -> None:
    deadline = time.monotonic() + timeout_seconds
    while not list(root.glob(pattern)):
        assert time.monotonic() < deadline, f"{pattern} never appeared"
        time.sleep(0.0005)


@pytest.mark.parametrize(
    "appearance",
    ["*step-00000004*", "*step-00000004*/__*", "*step-00000004*/.metadata", "step-00000004"],
)
def test_sigkill_of_everything_during_a_save(
    data: Path, tmp_path: Path, undisturbed: Path, appearance: str
) -> None:
    # GIVEN a run whose ranks, and with them their checkpoint workers, are killed during the second save
    config = async_recipe(data)
    ranks = Ranks(2, train_rank, config, tmp_path)
    wait_for(tmp_path / "checkpoints", "step-00000002")
    wait_for(tmp_path / "checkpoints", appearance)
    ranks.kill()
    # THEN a whole checkpoint is left
    newest = newest_checkpoint(tmp_path)
    assert commit.verify(newest).step in (2, 4, 6)
    # and the run goes on from it to the same bits
    run_ranks(2, train_rank, config, tmp_path)
    assert final_fingerprint(tmp_path) == final_fingerprint(undisturbed)
    assert step_losses(tmp_path)[6] == step_losses(undisturbed)[6]


def children(pid: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{pid}/task/{pid}/children").read_text().split()]


def worker_pids(ranks: Ranks, rank: int = 0) -> list[int]:
    """Return a rank's checkpoint workers: children of its fork server."""
    pid = ranks.processes[rank].pid
    assert pid is not None
    return [worker for server in children(pid) for worker in children(server)]


def test_workers_die_with_their_rank(data: Path, tmp_path: Path) -> None:
    ranks = Ranks(1, train_rank, async_recipe(data, ranks=1, steps=100_000), tmp_path)
    wait_for(tmp_path / "checkpoints", "step-*")
    workers = worker_pids(ranks)
    assert workers
    ranks.kill()
    deadline = time.monotonic() + 20
    while any(is_alive(worker) for worker in workers):
        assert time.monotonic() < deadline, "an orphaned worker is still there"
        time.sleep(0.05)


def damage_newest(run_dir: Path) -> Path:
    newest = newest_checkpoint(run_dir)
    shard = next(newest.glob("__0_*.distcp"))
    raw = bytearray(shard.read_bytes())
    raw[len(raw) // 2] ^= 1
    shard.write_bytes(raw)
    (run_dir / "DONE").unlink()
    return newest


def test_a_damaged_checkpoint_is_refused_and_the_one_before_it_used(
    data: Path, tmp_path: Path, undisturbed: Path
) -> None:
    config = async_recipe(data)
    run_ranks(2, train_rank, config, tmp_path)
    damaged = damage_newest(tmp_path)
    run_ranks(2, train_rank, config, tmp_path)
    refused = [event for event in read_events(tmp_path) if event["event"] == "refused"]
    assert {event["source"] for event in refused} == {str(damaged)}
    assert "xxh3 differs" in refused[0]["reason"]
    assert final_fingerprint(tmp_path) == final_fingerprint(undisturbed)


def test_never_starts_again_from_step_0(data: Path, tmp_path: Path) -> None:
    config = replaced(async_recipe(data, ranks=1), "checkpoint", every_steps=6)
    run_ranks(1, train_rank, config, tmp_path)
    damage_newest(tmp_path)
    with pytest.raises(RankFailed, match="holds 1 checkpoints and none can be used"):
        run_ranks(1, train_rank, config, tmp_path)


def test_refuses_a_checkpoint_of_another_model(data: Path, tmp_path: Path) -> None:
    config = async_recipe(data, ranks=1)
    run_ranks(1, train_rank, config, tmp_path)
    (tmp_path / "run.json").unlink()
    (tmp_path / "DONE").unlink()
    wider = replaced(config, "model", config={**config.model.config, "intermediate_size": 192})
    with pytest.raises(RankFailed, match="does not fit this model"):
        run_ranks(1, train_rank, wider, tmp_path)


def checkpoint_events(run_dir: Path, status: str) -> list[dict[str, Any]]:
    return [
        event
        for event in read_events(run_dir)
        if event["event"] == "checkpoint" and event["status"] == status
    ]


def kill_worker_once(run_dir: Path, ranks: Ranks) -> None:
    """SIGKILL rank 0's checkpoint worker after its first commit."""
    wait_for(run_dir / "checkpoints", "step-00000002")
    for worker in worker_pids(ranks):
        os.kill(worker, signal.SIGKILL)


def test_a_dead_worker_is_replaced_and_training_goes_on(data: Path, tmp_path: Path) -> None:
    config = async_recipe(data, ranks=1, steps=60)
    ranks = Ranks(1, train_rank, config, tmp_path)
    kill_worker_once(tmp_path, ranks)
    ranks.wait()
    assert commit.verify(newest_checkpoint(tmp_path)).step == 60


def test_failed_saves_are_counted_and_a_failed_last_save_ends_the_run(data: Path, tmp_path: Path) -> None:
    # GIVEN storage that takes no directory: a file stands where checkpoints go
    (tmp_path / "checkpoints").write_text("")
    with pytest.raises(RankFailed, match="the last checkpoint failed on ranks"):
        run_ranks(1, train_rank, async_recipe(data, ranks=1), tmp_path)
    failed = {event["step"] for event in checkpoint_events(tmp_path, "failed")}
    assert failed == {2, 4, 6}
    assert not (tmp_path / "DONE").exists()
    assert len(step_losses(tmp_path)) == 6


def snapshot_steps_while_slots_are_locked(config: JobConfig, run_dir: Path) -> list[int]:
    """Train with two slots of four that can be used, as on a GPU whose pages are being locked."""
    from training.restart import open_group
    from training.snapshot import Snapshots
    from training.worker import Worker

    Snapshots._is_usable = lambda self, slot: slot in self._slots[:2]  # type: ignore[method-assign]
    taken: list[int] = []
    take = Snapshots.take

    def note(self: Snapshots, mark: Mark, notes: Tensor) -> bool:
        taken.append(mark.step)
        return take(self, mark, notes)

    Snapshots.take = note  # type: ignore[method-assign]
    worker = Worker(config, run_dir)
    open_group(worker.device, iteration=0, config=config.recovery)
    trainer = worker.make_trainer()
    for _ in range(5):
        trainer.run_step()
    trainer.close()
    worker.close()
    return taken


def test_early_snapshots_are_taken_by_all_ranks_or_by_none(data: Path, tmp_path: Path) -> None:
    """GIVEN room for two THEN no rank decides by what another told before it took the first."""
    config = tiny_recipe(data, ranks=2, checkpoint={"writer": "holdfast", "every_steps": 100})
    assert run_ranks(2, snapshot_steps_while_slots_are_locked, config, tmp_path) == [[1, 3]] * 2
