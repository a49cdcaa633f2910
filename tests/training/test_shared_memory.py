from __future__ import annotations

import multiprocessing
import os
import subprocess
import sys
from pathlib import Path

from training import shared_memory

LEAKED = """
import multiprocessing, os, signal
lock = multiprocessing.get_context("spawn").Lock()
print(lock._semlock.name, flush=True)
os.killpg(0, signal.SIGKILL)
"""


def test_slot_of_a_dead_process_goes_and_that_of_a_live_one_stays(tmp_path: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", ""])
    process.wait()
    dead, live = tmp_path / f"holdfast-{process.pid}-1.slot", tmp_path / f"holdfast-{os.getpid()}-1.slot"
    other = tmp_path / "holdfast"
    for path in (dead, live, other):
        path.touch()
    assert shared_memory.sweep(tmp_path) == [dead]
    assert sorted(tmp_path.iterdir()) == sorted([live, other])


def test_semaphore_of_a_killed_process_group_goes_and_one_in_use_stays() -> None:
    mine = multiprocessing.get_context("spawn").Lock()
    command = [sys.executable, "-c", LEAKED]
    killed = subprocess.run(command, capture_output=True, text=True, start_new_session=True, check=False)
    leaked = shared_memory.DIRECTORY / f"sem.{killed.stdout.strip().lstrip('/')}"
    kept = shared_memory.DIRECTORY / f"sem.{mine._semlock.name.lstrip('/')}"  # type: ignore[attr-defined]
    assert leaked.exists()
    assert leaked in shared_memory.sweep()
    assert kept.exists()
