from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

from tests.ranks import is_alive

ROOT = Path(__file__).parents[2]
# NVRx's queue in a rank that has such a server; argv: where the worker writes what it is
RANK = """
import os, sys, time
from pathlib import Path
from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue, AsyncRequest
import torch.distributed as dist
from training import writer_server
from training.processes import die_with_parent

def work(path):
    words = Path("/proc/self/cmdline").read_text().split("\\0")
    Path(path).write_text(f"{os.getpid()} {os.getppid()} {words[-2][:10]} {os.environ['MARK']}")

if __name__ == "__main__":
    os.environ["MARK"] = "of-the-rank"
    writer_server.start()
    dist.get_rank = lambda: 0
    queue = AsyncCallsQueue(persistent=True, cpu_shm_mode=True)
    queue.schedule_async_request(AsyncRequest(die_with_parent, (), []))
    queue.schedule_async_request(AsyncRequest(work, (sys.argv[1],), []))
    while queue.get_num_unfinalized_calls():
        queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        time.sleep(0.01)
    assert queue.persistent_caller.process.is_alive()
    print("done", flush=True)
    if sys.argv[2] == "wait":
        time.sleep(600)
    queue.close()
"""


def start(tmp_path: Path, end: str) -> subprocess.Popen[str]:
    script = tmp_path / "rank.py"
    script.write_text(RANK)
    command = [sys.executable, str(script), str(tmp_path / "worker"), end]
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "TMPDIR": str(tmp_path)}
    rank = subprocess.Popen(command, env=environ, stdout=subprocess.PIPE, text=True)
    assert rank.stdout is not None
    assert rank.stdout.readline() == "done\n"
    return rank


def gone(*pids: int) -> bool:
    deadline = time.monotonic() + 30
    while time.monotonic() < deadline:
        if not any(is_alive(pid) for pid in pids):
            return True
        time.sleep(0.02)
    return False


def test_checkpoint_worker_is_a_copy_and_ends_with_its_rank(tmp_path: Path) -> None:
    """GIVEN a rank with such a server THEN NVRx's worker runs the rank's own program, in its environment."""
    rank = start(tmp_path, "end")
    worker, server, program, mark = (tmp_path / "worker").read_text().split()
    assert (program, mark) == ("end", "of-the-rank")
    assert int(server) != rank.pid
    assert rank.wait(60) == 0
    assert gone(int(worker), int(server))
    assert rank.stdout is not None
    rank.stdout.close()


def test_worker_and_server_of_a_killed_rank_die(tmp_path: Path) -> None:
    rank = start(tmp_path, "wait")
    worker, server, _, _ = (tmp_path / "worker").read_text().split()
    rank.send_signal(signal.SIGKILL)
    rank.wait(60)
    assert gone(int(worker), int(server))
    assert rank.stdout is not None
    rank.stdout.close()
