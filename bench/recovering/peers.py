"""torchrun and plain NVRx under the same faults: launchers as process 1 of simulated pods, which the bench
starts again at once when they die, as a kubelet would."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from pathlib import Path

from training import environment
from training.processes import descendants, end_descendants
from training.rehearsal.isolation import Isolation

WORKER = Path(__file__).with_name("stock_worker.py")
SAVE_EVERY_STEPS = 10
WARM_STEPS = 30
START_SECONDS = 180.0
_POLL_SECONDS = 0.02

_COMMON = ("--nproc-per-node=1", "--rdzv-backend=c10d", "--rdzv-id=bench", "--max-restarts=100")
LAUNCHERS: Mapping[str, tuple[str, ...]] = {
    "torchrun": (sys.executable, "-m", "torch.distributed.run", "--nnodes=2", *_COMMON),
    "NVRx ft_launcher": (
        sys.executable,
        "-m",
        "nvidia_resiliency_ext.fault_tolerance.launcher",
        "--nnodes=2",
        *_COMMON,
        "--ft-initial-rank-heartbeat-timeout=60",
        "--ft-rank-heartbeat-timeout=15",
    ),
}


@dataclass(kw_only=True, slots=True)
class Peer:
    """Two nodes, and spares, under a launcher of the field."""

    launcher: str
    directory: Path
    isolation: Isolation
    port: int = field(default_factory=environment.free_port)
    pods: dict[int, subprocess.Popen[bytes]] = field(default_factory=dict)
    lost: set[int] = field(default_factory=set)

    def start(self, index: int) -> None:
        node, address = f"node-{index}", f"127.0.0.{index + 2}"
        host = ["--rdzv-conf=is_host=" + ("true" if index == 0 else "false")]
        options = [f"--rdzv-endpoint=127.0.0.2:{self.port}", f"--local-addr={address}", *host]
        command = [
            *LAUNCHERS[self.launcher],
            *options,
            str(WORKER),
            str(self.directory),
            str(SAVE_EVERY_STEPS),
        ]
        with (self.directory / f"{node}.log").open("ab") as log:
            self.pods[index] = subprocess.Popen(
                self.isolation.command(node, command),
                env={**os.environ, **self.isolation.environ(node), environment.ADDRESS: address},
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def keep_alive(self) -> None:
        """Start pods again that have died."""
        for index, pod in list(self.pods.items()):
            if pod.poll() is not None and index not in self.lost:
                self.start(index)

    def wait_for_step(self, *, after: float, step: int, limit_seconds: float) -> float | None:
        """Return when all ranks had done a step in processes that began after a time, None if too late."""
        deadline = time.monotonic() + limit_seconds
        while time.monotonic() < deadline:
            self.keep_alive()
            firsts = dict(self._first_steps(after=after, step=step))
            if len(firsts) == 2:
                return max(firsts.values())
            time.sleep(_POLL_SECONDS)
        return None

    def _first_steps(self, *, after: float, step: int) -> Iterator[tuple[int, float]]:
        for path in (self.directory / "steps").glob("*.jsonl"):
            rank, began = path.stem.split("-")
            if int(began) / 1e9 < after:
                continue
            for line in path.read_text().splitlines():
                entry = json.loads(line)
                if entry["step"] >= step:
                    yield int(rank), float(entry["time"])
                    break

    def worker_pid(self, index: int) -> int:
        below = descendants(self.pods[index].pid)
        return next(pid for pid in reversed(below) if WORKER.name in _command_line(pid))

    def launcher_pid(self, index: int) -> int:
        return descendants(self.pods[index].pid)[0]


@contextmanager
def running(peer: Peer, *, spares: int) -> Iterator[None]:
    """Start a peer's nodes, wait until they train, and leave nothing of them."""
    (peer.directory / "steps").mkdir(parents=True)
    try:
        for index in range(2 + spares):
            peer.start(index)
        if peer.wait_for_step(after=0.0, step=WARM_STEPS, limit_seconds=START_SECONDS) is None:
            raise RuntimeError(f"{peer.launcher} did not start, see {peer.directory}")
        yield
    finally:
        end_descendants()


def hit(peer: Peer, fault: str) -> float:
    """Do a fault and return when."""
    victim = peer.worker_pid(1) if fault == "worker" else 0
    if fault == "launcher":
        victim = peer.launcher_pid(1)
    elif fault == "node with spare":
        victim = peer.launcher_pid(1)
        peer.lost.add(1)
    elif fault == "control store":
        victim = peer.launcher_pid(0)  # it holds the store
    now = time.time()
    os.kill(victim, signal.SIGKILL)
    return now


def _command_line(pid: int) -> str:
    try:
        return Path(f"/proc/{pid}/cmdline").read_bytes().decode(errors="replace")
    except OSError:
        return ""
