"""Damage is real, and what it hits is refused; a whole run under it is judged in tests/faults."""

from __future__ import annotations

import errno
import os
import resource
import threading
from pathlib import Path

import pytest

from tests.ranks import run_ranks
from tests.tiny import tiny_recipe, train_rank
from training import commit, environment, fault_damage
from training.config import JobConfig
from training.events import read_events
from training.fault_damage import Target, disk_limit, fill_disk, flip_bit
from training.restart import close_group, open_group
from training.worker import Worker


def train_some(config: JobConfig, run_dir: Path, steps: int) -> None:
    """Be a rank that a kill ends after some steps: snapshots stay in memory, checkpoints on disk."""
    worker = Worker(config, run_dir)
    open_group(worker.device, iteration=0, config=config.recovery)
    trainer = worker.make_trainer()
    for _ in range(steps):
        trainer.run_step()
    trainer.close()
    close_group()


def target(config: JobConfig, run_dir: Path, *, rank: int) -> Target:
    return Target(run_dir=run_dir, job=config.job, rank=rank, node=environment.node_name())


def refused(run_dir: Path) -> list[tuple[str, int]]:
    return [
        (e["tier"], e["step"]) for e in read_events(run_dir) if e["event"] == "refused" and e["rank"] == 0
    ]


def restored(run_dir: Path) -> list[tuple[str, int]]:
    found = [e for e in read_events(run_dir) if e["event"] == "restored" and e["rank"] == 0]
    return [(event["source"], event["step"]) for event in found]


@pytest.mark.parametrize("replicas", [1, 2])
def test_damaged_snapshot_is_refused_and_the_one_before_it_taken(
    data: Path, tmp_path: Path, replicas: int
) -> None:
    config = tiny_recipe(data, ranks=2, job={"replicas": replicas})
    run_ranks(2, train_some, config, tmp_path, 5)
    for rank in range(replicas):  # a copy of the shard on the same node would do
        assert target(config, tmp_path, rank=rank).flip_snapshot() == {"damaged_step": 5}
    run_ranks(2, train_rank, config, tmp_path)
    assert refused(tmp_path) == [("memory", 5)]
    assert restored(tmp_path) == [("memory", 4)]


def test_damaged_checkpoint_is_refused_and_the_one_before_it_taken(data: Path, tmp_path: Path) -> None:
    config = tiny_recipe(data, ranks=2)
    run_ranks(2, train_some, config, tmp_path, 5)
    damage = target(config, tmp_path, rank=1).flip_checkpoint()
    assert damage == {"damaged_path": str(tmp_path / "checkpoints" / "step-00000004")}
    run_ranks(2, train_rank, config, tmp_path)
    assert ("durable", 4) in refused(tmp_path)
    assert restored(tmp_path) == [("durable", 2)]


def test_a_checkpoint_that_is_being_written_is_waited_for_and_damaged(
    data: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fault_damage, "COMMIT_SECONDS", 60.0)
    config = tiny_recipe(data, ranks=2)
    run_ranks(2, train_some, config, tmp_path, 7)
    newest = commit.committed_checkpoints(tmp_path / "checkpoints")[0]
    partial = commit.partial_path(newest.parent, 6, "000000000000000a")
    newest.rename(partial)
    commits = threading.Timer(0.5, partial.rename, (newest,))
    commits.start()
    assert target(config, tmp_path, rank=1).flip_checkpoint() == {"damaged_path": str(newest)}
    commits.join()


def test_nothing_is_damaged_where_no_state_would_be_left(data: Path, tmp_path: Path) -> None:
    config = tiny_recipe(data)
    run_ranks(1, train_some, config, tmp_path, 3)
    [only] = commit.committed_checkpoints(tmp_path / "checkpoints")
    assert target(config, tmp_path, rank=0).flip_checkpoint() is None
    commit.verify(only)
    assert target(config, tmp_path, rank=0).flip_snapshot() == {"damaged_step": 3}


def test_full_disk_fails_one_save_and_training_goes_on(data: Path, tmp_path: Path) -> None:
    config = tiny_recipe(data, ranks=2, checkpoint={"writer": "holdfast"})
    fill_disk(tmp_path, rank=1)
    run_ranks(2, train_rank, config, tmp_path)
    failed = [e for e in read_events(tmp_path) if e["event"] == "checkpoint" and e["status"] == "failed"]
    assert {event["step"] for event in failed} == {2}
    assert any(event["role"] == "writer" and event["rank"] == 1 for event in failed)
    steps = [commit.step_of(path) for path in commit.committed_checkpoints(tmp_path / "checkpoints")]
    assert steps == [6, 4]


def test_flipped_bit_changes_one_byte(tmp_path: Path) -> None:
    path = tmp_path / "file"
    path.write_bytes(bytes(4096))
    flip_bit(path)
    assert sum(path.read_bytes()) == 1


def test_part_of_a_checkpoint_finds_no_space_once(tmp_path: Path) -> None:
    fill_disk(tmp_path, rank=0)
    before = resource.getrlimit(resource.RLIMIT_FSIZE)
    with disk_limit(tmp_path, rank=1, size_bytes=1000):
        (tmp_path / "other-rank").write_bytes(bytes(1000))
    with (
        pytest.raises(OSError, match=os.strerror(errno.EFBIG)),
        disk_limit(tmp_path, rank=0, size_bytes=1000),
    ):
        (tmp_path / "part").write_bytes(bytes(1000))
    assert resource.getrlimit(resource.RLIMIT_FSIZE) == before
    with disk_limit(tmp_path, rank=0, size_bytes=1000):
        (tmp_path / "part").write_bytes(bytes(1000))
