"""Two hundred saves of a real rank: nothing of them may pile up in it or in its checkpoint workers."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from tests.ranks import Ranks
from tests.tiny import tiny_recipe, train_rank
from tests.training.process_use import Use, use_of
from tests.training.test_checkpoint import checkpoint_events, worker_pids

SAVES = 200
# After this many, all that is made once has been made.
SETTLED = 40
GROWTH_KIB = 4 * 1024
KEPT = 2


def uses(ranks: Ranks) -> dict[int, Use]:
    pids = [process.pid for process in ranks.processes]
    workers = [pid for rank in range(len(pids)) for pid in worker_pids(ranks, rank)]
    return {pid: least_use(pid) for pid in (*pids, *workers) if pid is not None}


def least_use(pid: int) -> Use:
    """Look often: files are open while a save is written."""
    looks = []
    for _ in range(10):
        looks.append(use_of(pid))
        time.sleep(0.1)
    return min(looks, key=lambda use: use.descriptors)


def wait_for_saves(run_dir: Path, count: int, ranks: Ranks) -> None:
    while len(checkpoint_events(run_dir, "committed")) < count:
        assert all(process.is_alive() for process in ranks.processes)
        time.sleep(0.5)


@pytest.mark.timeout(1200)
def test_two_hundred_saves_leave_memory_threads_and_descriptors_flat(data: Path, tmp_path: Path) -> None:
    checkpoint = {
        "writer": "holdfast",
        "every_steps": 1,
        "keep": KEPT,
        "local": {"directory": str(tmp_path / "disk"), "every_steps": 1},
    }
    config = tiny_recipe(data, training={"steps": 1_000_000}, checkpoint=checkpoint)
    ranks = Ranks(1, train_rank, config, tmp_path / "run")
    try:
        wait_for_saves(tmp_path / "run", SETTLED, ranks)
        early = uses(ranks)
        wait_for_saves(tmp_path / "run", SAVES, ranks)
        late = uses(ranks)
    finally:
        ranks.kill()
    assert early.keys() == late.keys()
    for pid, use in early.items():
        assert late[pid].threads <= use.threads
        assert late[pid].descriptors <= use.descriptors
        assert late[pid].memory_kib <= use.memory_kib + GROWTH_KIB
    assert checkpoint_events(tmp_path / "run", "failed") == []
