"""A cluster on one machine: the control store and `job.nodes` launchers, each a node of its own.

What Kubernetes does for a run is done here: a control process or a node that ends is started again,
a configuration error fails the whole run.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from types import TracebackType
from typing import Self

from training import environment
from training.config import JobConfig
from training.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY, EXIT_SAME_STEP
from training.processes import end_descendants, reap_orphans

POLL_SECONDS = 0.1
GRACE_SECONDS = 5
POD_RESTARTS = 5


class SimulatedCluster:
    """Processes of one run; nothing of them is left after the `with` block."""

    def __init__(
        self, config: JobConfig, *, recipe: Path, run_dir: Path, temporary: Path, with_faults: bool
    ) -> None:
        """Prepare a run.

        Args:
            config: The recipe.
            recipe: Its file.
            run_dir: Directory of the run.
            temporary: Directory for the nodes' sockets and marks.
            with_faults: Let the recipe's planned faults hit.
        """
        self._config, self._recipe, self._run_dir = config, recipe, run_dir
        self._temporary, self._with_faults = temporary, with_faults
        self._port = environment.free_port()
        self._control: subprocess.Popen[bytes] | None = None
        self._nodes: dict[int, subprocess.Popen[bytes]] = {}
        self._restarts_left = POD_RESTARTS

    def __enter__(self) -> Self:
        (self._run_dir / "logs").mkdir(parents=True, exist_ok=True)
        self._control = self._start_control()
        for index in range(self._config.job.nodes + self._config.job.spares):
            self._nodes[index] = self._start_node(index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for process in [*self._nodes.values(), *([self._control] if self._control else [])]:
            if process.poll() is None:
                process.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(node.poll() is None for node in self._nodes.values()):
            time.sleep(POLL_SECONDS)
        end_descendants()

    def wait(self, watch: Callable[[], None]) -> int:
        """Run to the end and return the exit code of the run.

        Args:
            watch: Called on every poll.
        """
        while self._nodes:
            watch()
            reap_orphans(keep=self._pids())
            if self._control is not None and self._control.poll() not in (None, EXIT_DONE):
                self._control = self._start_control()
            code = self._collect()
            if code is not None:
                return code
            time.sleep(POLL_SECONDS)
        watch()
        return EXIT_DONE

    def _collect(self) -> int | None:
        """Handle nodes that have ended; return the run's exit code once it has failed for good."""
        for index, node in list(self._nodes.items()):
            code = node.poll()
            if code is None:
                continue
            del self._nodes[index]
            if code in (EXIT_CONFIG, EXIT_SAME_STEP):
                return code
            if code != EXIT_DONE:
                if not self._restarts_left or not self._config.recovery.in_job:
                    return EXIT_RETRY
                self._restarts_left -= 1
                self._nodes[index] = self._start_node(index)
        return None

    def _pids(self) -> list[int]:
        processes = [*self._nodes.values(), *([self._control] if self._control else [])]
        return [process.pid for process in processes]

    def _start_control(self) -> subprocess.Popen[bytes]:
        options = ["--host", "127.0.0.1", "--port", str(self._port), "--linger-seconds", "1"]
        return self._start("control", ["control", str(self._recipe), *options], {})

    def _start_node(self, index: int) -> subprocess.Popen[bytes]:
        name = f"node-{index}"
        extra = {
            environment.NODE: name,
            environment.NODE_INDEX: str(index),
            environment.CONTROL: f"127.0.0.1:{self._port}",
            environment.ADDRESS: "127.0.0.1",
            environment.GRACE_SECONDS: str(GRACE_SECONDS),
            **self._visible_gpus(index),
        }
        if self._with_faults:
            extra[environment.REHEARSAL] = "1"
        return self._start(name, ["launch", str(self._recipe), "--run-dir", str(self._run_dir)], extra)

    def _start(self, name: str, command: list[str], extra: dict[str, str]) -> subprocess.Popen[bytes]:
        directory = self._temporary / name
        directory.mkdir(exist_ok=True)
        environ = {
            **os.environ,
            environment.RUN_ID: self._config.job.name,
            "TMPDIR": str(directory),
            **extra,
        }
        with (self._run_dir / "logs" / f"{name}.log").open("ab") as log:
            return subprocess.Popen(
                [sys.executable, "-m", "training", *command],
                env=environ,
                stdin=subprocess.DEVNULL,
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    def _visible_gpus(self, index: int) -> dict[str, str]:
        """Give each node its own share of this machine's GPUs, where it has enough of them."""
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        ranks = self._config.job.ranks_per_node
        if self._config.training.device == "cpu" or gpus < self._config.job.world_size:
            return {}
        own = range(index * ranks, (index + 1) * ranks)
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in own)}
