"""Storage and workers that fail: noticed, named, counted, replaced; training goes on."""

from __future__ import annotations

import os
import resource
import shutil
import signal
import time
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path

import pytest
import torch.distributed as dist

from tests.ranks import Ranks, run_ranks
from tests.tiny import replaced, tiny_recipe, train_rank
from tests.training.kill_points import in_child
from tests.training.test_checkpoint import checkpoint_events, children, wait_for, worker_pids
from tests.training.test_kill_points import run_dir, save_request, save_step, visible  # noqa: F401 - a fixture
from training import commit, drain
from training.drain_worker import DrainWorker, Outcome, leave_outcome, read_outcome
from training.fingerprint import newest_checkpoint


def fill_disk(target: Path) -> None:
    """Let no file grow beyond the headers: what a full disk is to a writer."""
    signal.signal(signal.SIGXFSZ, signal.SIG_IGN)
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, 900))


def put_a_file_there(target: Path) -> None:
    target.write_text("")


def forbid(target: Path) -> None:
    """Lead to where not even root may make a directory."""
    target.symlink_to("/proc/self")


def lose_the_mount(target: Path) -> None:
    target.symlink_to(target.parent / "gone" / "storage")


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (fill_disk, "File too large|inline_container|unexpected pos"),
        (put_a_file_there, "NotADirectoryError"),
        (forbid, "PermissionError|FileNotFoundError|No such file"),
        (lose_the_mount, "FileExistsError|FileNotFoundError"),
    ],
)
def test_storage_that_fails_is_named_and_a_later_save_succeeds(
    run_dir: Path,  # noqa: F811
    damage: Callable[[Path], None],
    reason: str,
) -> None:
    target, request = run_dir / "checkpoints", save_request(run_dir, 3)

    def save() -> int:
        damage(target)
        drain.drain(request)
        return 0

    assert in_child(save) == 0
    outcome = read_outcome(request.outcome_path, 3)
    assert outcome is not None and outcome.failure
    assert any(word in outcome.failure for word in reason.split("|")), outcome.failure
    # WHEN the storage is there again
    if target.is_symlink() or target.is_file():
        target.unlink()
    assert in_child(lambda: save_step(run_dir, 3)) == 0
    assert visible(run_dir) == [3]


def test_storage_that_goes_while_ranks_write_is_given_up_at_the_deadline(run_dir: Path) -> None:  # noqa: F811
    request = save_request(run_dir, 3)
    save = drain.Save(
        run_dir=run_dir, mark=request.save.mark, world_size=2, keep=2, deadline=time.time() + 1.0
    )

    def write_alone() -> int:
        drain.drain(replace(request, save=save))
        return 0

    assert in_child(write_alone) == 0
    outcome = read_outcome(request.outcome_path, 3)
    assert outcome is not None and "no result of rank 1 before the deadline" in outcome.failure
    shutil.rmtree(run_dir / "checkpoints")
    assert not visible(run_dir)


def leave(path: Path, step: int) -> None:
    leave_outcome(path, Outcome(step=step))


def leave_when_told(path: Path, step: int) -> None:
    while not path.with_name("told").exists():
        time.sleep(0.01)
    leave(path, step)


def say_nothing() -> None:
    """End without an outcome."""


def awaited(worker: DrainWorker, path: Path, step: int) -> Outcome:
    deadline = time.monotonic() + 80
    while (outcome := worker.outcome(path, step)) is None:
        assert time.monotonic() < deadline
        time.sleep(0.01)
    return outcome


def meet_every_failure(path: Path) -> list[str]:
    """Have one worker be slow, silent, killed, stuck, and well again after each."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    worker, failures = DrainWorker("test"), []
    worker.start()
    worker.submit(leave_when_told, path, 1)
    assert worker.outcome(path, 1) is None
    path.with_name("told").touch()
    failures.append(awaited(worker, path, 1).failure)
    worker.submit(say_nothing)
    failures.append(awaited(worker, path, 2).failure)
    worker.submit(time.sleep, 600)
    kill_workers()
    failures.append(awaited(worker, path, 3).failure)
    worker.submit(leave, path, 4)
    failures.append(awaited(worker, path, 4).failure)
    worker.submit(time.sleep, 600)
    worker.abandon()
    worker.submit(leave, path, 5)
    failures.append(awaited(worker, path, 5).failure)
    worker.submit(time.sleep, 600)
    kill_workers()
    failures.append(awaited(worker, path, 6).failure)
    worker.close()
    worker.start()
    worker.submit(leave, path, 7)
    failures.append(awaited(worker, path, 7).failure)
    kill_workers()
    worker.close()  # also with nothing in hand
    return failures


def kill_workers() -> None:
    for server in children(os.getpid()):
        for pid in children(server):
            os.kill(pid, signal.SIGKILL)


@pytest.mark.timeout(300)
def test_a_worker_that_is_slow_silent_killed_or_stuck(tmp_path: Path) -> None:
    [failures] = run_ranks(1, meet_every_failure, tmp_path / "outcome.json")
    assert failures == ["", "its worker left no outcome", "its worker died", "", "", "its worker died", ""]


@pytest.mark.timeout(300)
def test_a_stuck_worker_is_given_up_at_the_deadline_and_the_next_save_succeeds(
    data: Path, tmp_path: Path
) -> None:
    config = tiny_recipe(data, training={"steps": 1_000_000}, checkpoint={"writer": "holdfast"})
    config = replaced(config, "checkpoint", overlap="defer", deadline_seconds=15.0, every_steps=20)
    ranks = Ranks(1, train_rank, config, tmp_path)
    wait_for(tmp_path / "checkpoints", "step-*", timeout_seconds=100)
    # GIVEN a worker that hangs, as one does on a file system that does not answer
    for pid in worker_pids(ranks):
        os.kill(pid, signal.SIGSTOP)
    deadline = time.monotonic() + 100
    while not (failed := checkpoint_events(tmp_path, "failed")):
        assert time.monotonic() < deadline
        time.sleep(0.05)
    assert "no end before checkpoint.deadline_seconds" in failed[0]["reason"]
    # THEN another takes its place
    while commit.step_of(newest_checkpoint(tmp_path)) <= failed[0]["step"]:
        assert time.monotonic() < deadline
        time.sleep(0.05)
    ranks.kill()
