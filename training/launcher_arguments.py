"""Command lines of `ft_launcher` and `nvrx-control`, computed from the recipe.

Settings go in as flags: NVRx 0.6.0 overwrites values from its YAML file with its own defaults.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path

from training import environment
from training.config import JobConfig
from training.errors import ConfigError

# NVRx closes the whole rendezvous for ever when more launchers than MAX have joined a round, and one
# that is killed while it waits leaves its slot behind (NVRx issue #348): far above any real number.
MAXIMUM_NODES = 1000
# Survivors that wait longer than this for a replacement would close the rendezvous for everybody.
JOIN_TIMEOUT_SECONDS = 86_400
STORE_READ_TIMEOUT_SECONDS = 30
STORE_CONNECT_SECONDS = 600
MONITOR_INTERVAL_SECONDS = 0.1
HANG_CHECK_INTERVAL_SECONDS = 1.0
CHECKPOINT_MARGIN_SECONDS = 30.0
# Time that survivors of a fault get between the stop signal and SIGKILL.
WORKERS_STOP_SECONDS = 5
GPU_MEMORY_RECLAIM_SECONDS = 50


@dataclass(frozen=True, kw_only=True, slots=True)
class NodePlace:
    """Where this node stands in the run."""

    control: tuple[str, int]
    """Host and port of the control store."""
    address: str
    """Address of this node that its peers reach."""
    index: int
    """Number of this node among all, spares included."""


def run_id(config: JobConfig) -> str:
    """Return the name that keeps this run's keys in the store apart from others'."""
    return os.environ.get(environment.RUN_ID) or config.job.name


def control_arguments(config: JobConfig, *, host: str, port: int) -> list[str]:
    """Return the arguments of `nvrx-control`."""
    rendezvous = {
        "read_timeout": STORE_READ_TIMEOUT_SECONDS,
        "join_timeout": JOIN_TIMEOUT_SECONDS,
        # read by 0.7.0 only: `ControlState` waits for survivors, and for nobody who is silent
        "last_call_timeout": 0,
    }
    return [
        f"--nnodes={config.job.nodes}:{MAXIMUM_NODES}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{port}",
        f"--rdzv-id={run_id(config)}",
        _rendezvous_flag(rendezvous),
        "--ft-enable-log-server=false",
    ]


def launcher_arguments(
    config: JobConfig, *, place: NodePlace, stop_seconds: float, worker: list[str]
) -> list[str]:
    """Return the arguments of `ft_launcher`.

    Args:
        config: The recipe.
        place: This node's place in the run.
        stop_seconds: Time that workers get to stop after SIGTERM.
        worker: Command of one training rank.
    """
    host, port = place.control
    rendezvous = {
        "is_host": "false",
        "store_connect_wait_seconds": STORE_CONNECT_SECONDS,
        "read_timeout": STORE_READ_TIMEOUT_SECONDS,
        "join_timeout": JOIN_TIMEOUT_SECONDS,
    }
    return [
        f"--nnodes={config.job.nodes}:{MAXIMUM_NODES}",
        f"--nproc-per-node={config.job.ranks_per_node}",
        f"--max-restarts={config.recovery.maximum_restarts if config.recovery.in_job else 0}",
        "--rdzv-backend=c10d",
        f"--rdzv-endpoint={host}:{port}",
        f"--rdzv-id={run_id(config)}",
        _rendezvous_flag(rendezvous),
        f"--local-addr={place.address}",
        f"--monitor-interval={MONITOR_INTERVAL_SECONDS}",
        f"--workers-stop-timeout={WORKERS_STOP_SECONDS}",
        f"--term-timeout={stop_seconds:g}",
        f"--ft-gpu-memory-reclaim-timeout={_reclaim_seconds()}",
        "--ft-enable-log-server=false",
        # NVRx's breaker counts steps on disk only; ours is EXIT_SAME_STEP
        "--ft-max-no-progress-cycles=0",
        *_hang_arguments(config),
        "--no-python",
        *worker,
    ]


def worker_command(recipe: Path, run_dir: Path) -> list[str]:
    """Return the command of one training rank."""
    return [sys.executable, "-m", "training", "run", str(recipe), "--run-dir", str(run_dir)]


def node_place(config: JobConfig, *, control: tuple[str, int] | None) -> NodePlace:
    """Return this node's place, from the environment.

    Raises:
        ConfigError: Several nodes and no control store, or a variable that is no number.
    """
    if control is None:
        rule = f"is required for nodes={config.job.nodes}"
        fix = "start `python -m training control RECIPE` and set it to that host:port on every node"
        raise ConfigError.of(environment.CONTROL, None, rule, fix)
    index = environment.integer(environment.NODE_INDEX, 0)
    address = os.environ.get(environment.ADDRESS) or ("127.0.0.1" if _is_loopback(control) else "")
    return NodePlace(control=control, address=address or environment.node_name(), index=index)


def _rendezvous_flag(settings: Mapping[str, object]) -> str:
    return "--rdzv-conf=" + ",".join(f"{key}={value}" for key, value in settings.items())


def _hang_arguments(config: JobConfig) -> list[str]:
    """Return section limits. NVRx detects no hang, and no lost node, unless they are set."""
    recovery = config.recovery
    # the last save, and that of a run that is told to stop, may take as long as its deadline
    save_seconds = config.checkpoint.deadline_seconds + CHECKPOINT_MARGIN_SECONDS
    sections = {
        "setup": recovery.setup_timeout_seconds,
        "step": recovery.step_timeout_seconds,
        "checkpoint": max(recovery.checkpoint_timeout_seconds, save_seconds),
    }
    return [
        "--ft-rank-section-timeouts=" + ",".join(f"{name}:{limit:g}" for name, limit in sections.items()),
        f"--ft-rank-out-of-section-timeout={recovery.out_of_section_timeout_seconds:g}",
        f"--ft-workload-check-interval={HANG_CHECK_INTERVAL_SECONDS:g}",
    ]


def _reclaim_seconds() -> int:
    """Return how long to wait for a dead rank's GPU memory; not at all where there is no GPU."""
    return GPU_MEMORY_RECLAIM_SECONDS if Path("/dev/nvidiactl").exists() else 0


def _is_loopback(endpoint: tuple[str, int]) -> bool:
    return endpoint[0] in ("127.0.0.1", "localhost", "::1")
