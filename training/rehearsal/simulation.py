"""A cluster on one machine: the control store and `job.nodes` launchers, each a pod of its own.

What Kubernetes does for a run is done here: a control process or a node that ends is started again,
a configuration error fails the whole run. Faults that are greater than a rank are done here too: the
rank that sets the time says so in its events.
"""

from __future__ import annotations

import signal
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from training import environment
from training.config import JobConfig
from training.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY, EXIT_SAME_STEP
from training.events import EventLog
from training.processes import end_descendants, reap_orphans
from training.rehearsal.isolation import LOCAL_DISK, Isolation
from training.rehearsal.node import SimulatedPod
from training.rehearsal.progress import EventTail

POLL_SECONDS = 0.1
GRACE_SECONDS = 5
# Of a node that is told to stop: its ranks save their state first.
NODE_GRACE_SECONDS = 30
POD_RESTARTS = 20
CONTROL_LOST_SECONDS = 3.0
# A spare takes a lost node's place long before the node is replaced.
NODE_REPLACED_SECONDS = 60.0


class SimulatedCluster:
    """Processes of one run; nothing of them is left after the `with` block."""

    def __init__(
        self, config: JobConfig, *, recipe: Path, run_dir: Path, isolation: Isolation, with_faults: bool
    ) -> None:
        """Prepare a run.

        Args:
            config: The recipe.
            recipe: Its file.
            run_dir: Directory of the run.
            isolation: What keeps the nodes apart.
            with_faults: Let the recipe's planned faults hit.
        """
        self._config, self._recipe, self._run_dir = config, recipe, run_dir
        self._isolation, self._with_faults = isolation, with_faults
        self._port = environment.free_port()
        self._control: SimulatedPod | None = None
        self._nodes: dict[int, SimulatedPod] = {}
        self._restarts_left = POD_RESTARTS
        self._tail = EventTail(run_dir)
        self._control_due = 0.0
        self._replaced_at: dict[int, float] = {}

    def __enter__(self) -> Self:
        (self._run_dir / "logs").mkdir(parents=True, exist_ok=True)
        self._events = EventLog(self._run_dir, role="rehearsal", node="rehearsal")
        self._control = self._start_control()
        for index in range(self._config.job.launchers):
            self._nodes[index] = self._start_node(index)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for pod in self._pods():
            pod.send_signal(signal.SIGTERM)
        deadline = time.monotonic() + GRACE_SECONDS
        while time.monotonic() < deadline and any(node.poll() is None for node in self._nodes.values()):
            time.sleep(POLL_SECONDS)
        end_descendants()
        self._events.close()

    def wait(self, watch: Callable[[], None]) -> int:
        """Run to the end and return the exit code of the run.

        Args:
            watch: Called on every poll.
        """
        while self._nodes or (self._replaced_at and not (self._run_dir / "DONE").exists()):
            watch()
            reap_orphans(keep=[pod.pid for pod in self._pods()])
            for event in self._tail.read():
                self._inflict(event)
            self._ensure_control()
            self._replace_nodes()
            code = self._collect()
            if code is not None:
                return code
            time.sleep(POLL_SECONDS)
        watch()
        return EXIT_DONE

    def _inflict(self, event: Mapping[str, Any]) -> None:
        """Do to the cluster what a planned fault asks for."""
        if event["event"] != "fault":
            return
        if event["kind"] == "control_loss" and self._control is not None:
            self._control.lose()
            self._control_due = time.monotonic() + CONTROL_LOST_SECONDS
        if event["kind"] in ("node_loss", "sigterm"):
            index = int(event["node"].removeprefix("node-"))
            node = self._nodes.get(index)
            if node is not None:  # or it has ended meanwhile, by another fault
                self._inflict_on(node, index, lost=event["kind"] == "node_loss")

    def _inflict_on(self, node: SimulatedPod, index: int, *, lost: bool) -> None:
        if not lost:
            node.send_signal(signal.SIGTERM)
            return
        node.lose()
        if self._config.job.spares:
            self._replaced_at[index] = time.monotonic() + NODE_REPLACED_SECONDS

    def _replace_nodes(self) -> None:
        now = time.monotonic()
        for index in [index for index, due in self._replaced_at.items() if now >= due]:
            del self._replaced_at[index]
            self._nodes[index] = self._start_node(index)

    def _ensure_control(self) -> None:
        if self._control is None or self._control.poll() in (None, EXIT_DONE):
            return
        if time.monotonic() >= self._control_due:
            self._tell_end(self._control)
            self._control = self._start_control()

    def _tell_end(self, pod: SimulatedPod) -> None:
        code = pod.poll()
        assert code is not None
        self._events.emit(
            "process_exit",
            name=pod.name,
            exit_code=code if code >= 0 else None,
            signal=-code if code < 0 else None,
        )

    def _collect(self) -> int | None:
        """Handle nodes that have ended; return the run's exit code once it has failed for good."""
        for index, node in list(self._nodes.items()):
            code = node.poll()
            if code is None:
                continue
            del self._nodes[index]
            self._tell_end(node)
            if code in (EXIT_CONFIG, EXIT_SAME_STEP):
                return code
            if code != EXIT_DONE:
                if not self._restarts_left or not self._config.recovery.in_job:
                    return EXIT_RETRY
                self._restarts_left -= 1
                self._replaced_at.setdefault(index, 0.0)
        return None

    def _pods(self) -> list[SimulatedPod]:
        return [*self._nodes.values(), *([self._control] if self._control else [])]

    def _start_control(self) -> SimulatedPod:
        options = ["--host", "127.0.0.1", "--port", str(self._port), "--linger-seconds", "1"]
        return self._start("control", ["control", str(self._recipe), *options], {})

    def _start_node(self, index: int) -> SimulatedPod:
        name = f"node-{index}"
        extra = {
            environment.NODE: name,
            environment.NODE_INDEX: str(index),
            environment.CONTROL: f"127.0.0.1:{self._port}",
            # Of its own: NVRx knows a launcher by address and pid, and pids are alike on all nodes
            environment.ADDRESS: f"127.0.0.{index + 2}",
            environment.GRACE_SECONDS: str(NODE_GRACE_SECONDS),
            # NCCL takes ranks of one host for neighbours that share memory
            "NCCL_HOSTID": f"{self._config.job.name}-{name}",
            LOCAL_DISK: self._config.checkpoint.local.directory,
            **self._visible_gpus(index),
        }
        if self._with_faults:
            extra[environment.REHEARSAL] = "1"
        return self._start(name, ["launch", str(self._recipe), "--run-dir", str(self._run_dir)], extra)

    def _start(self, name: str, command: list[str], extra: dict[str, str]) -> SimulatedPod:
        return SimulatedPod(
            name,
            command,
            isolation=self._isolation,
            environ={environment.RUN_ID: self._config.job.name, **extra},
            log=self._run_dir / "logs" / f"{name}.log",
        )

    def _visible_gpus(self, index: int) -> dict[str, str]:
        """Give each node its own share of this machine's GPUs, where it has enough of them."""
        gpus = len(list(Path("/dev").glob("nvidia[0-9]*")))
        ranks = self._config.job.ranks_per_node
        if self._config.training.device == "cpu" or gpus < self._config.job.world_size:
            return {}
        if (index + 1) * ranks > gpus:  # a spare works with the GPUs of the node that it replaces
            index = self._lost_node()
        own = range(index * ranks, (index + 1) * ranks)
        return {"CUDA_VISIBLE_DEVICES": ",".join(str(gpu) for gpu in own)}

    def _lost_node(self) -> int:
        """Return the first node whose loss is planned."""
        lost = (fault.rank for fault in self._config.rehearsal.faults if fault.kind == "node_loss")
        return next(lost, 0) // self._config.job.ranks_per_node
