"""Environment variables between Holdfast's processes: the pod's manifest, `launch`, `control`, ranks.

who sets it                variable                 who reads it
manifest, rehearse         HOLDFAST_CONTROL         launch, ranks    host:port of `training control`
manifest, rehearse         HOLDFAST_RUN_ID          launch, control  the same on all; default: job.name
manifest, rehearse         HOLDFAST_NODE            launch, ranks    name in events; default: host name
manifest, rehearse         HOLDFAST_NODE_INDEX      launch           0, 1, ... spares included
manifest (status.podIP)    HOLDFAST_ADDRESS         launch           address that peers reach
manifest                   HOLDFAST_GRACE_SECONDS   launch, ranks    SIGTERM to SIGKILL; below the pod's
people                     HOLDFAST_STOP_FILE       launch           see training/stop_notice.py
people                     HOLDFAST_STOP_AT         launch           see training/stop_notice.py
rehearse                   HOLDFAST_REHEARSAL       ranks            "1": planned faults are live
people                     HOLDFAST_WARM_WORKERS    launch, agent    "0": no fork server; starts take longer
launch                     HOLDFAST_EXIT_FILE       ranks            see `leave_exit_code`
launch                     HOLDFAST_ROUND_FILE      agent            round that this node last worked in
launch                     HOLDFAST_KEEPER          ranks            see training/slot_owners.py
people                     HOLDFAST_SHARED_MEMORY   ranks            where snapshots lie; default: /dev/shm
"""

from __future__ import annotations

import os
import socket
import tempfile
from pathlib import Path

from training.errors import EXIT_CONFIG, EXIT_SAME_STEP, ConfigError

CONTROL = "HOLDFAST_CONTROL"
RUN_ID = "HOLDFAST_RUN_ID"
NODE = "HOLDFAST_NODE"
NODE_INDEX = "HOLDFAST_NODE_INDEX"
ADDRESS = "HOLDFAST_ADDRESS"
GRACE_SECONDS = "HOLDFAST_GRACE_SECONDS"
STOP_FILE = "HOLDFAST_STOP_FILE"
STOP_AT = "HOLDFAST_STOP_AT"
WARM_WORKERS = "HOLDFAST_WARM_WORKERS"
REHEARSAL = "HOLDFAST_REHEARSAL"
EXIT_FILE = "HOLDFAST_EXIT_FILE"
ROUND_FILE = "HOLDFAST_ROUND_FILE"
SHARED_MEMORY = "HOLDFAST_SHARED_MEMORY"
KEEPER = "HOLDFAST_KEEPER"

DEFAULT_GRACE_SECONDS = 30
# Part of the grace that is kept for the launcher's own end, after its workers.
GRACE_MARGIN_SECONDS = 3
_SOCKET_BASE_CHARACTERS = 30


def node_name() -> str:
    """Return the name of this (real or simulated) machine."""
    return os.environ.get(NODE) or socket.gethostname()


def shared_memory() -> Path:
    """Return the memory-backed file system that outlives processes."""
    return Path(os.environ.get(SHARED_MEMORY) or "/dev/shm")


def grace_seconds() -> int:
    """Return how long a node has from SIGTERM to SIGKILL."""
    return integer(GRACE_SECONDS, DEFAULT_GRACE_SECONDS)


def stop_seconds() -> int:
    """Return how much of the grace the node's ranks have."""
    return max(1, grace_seconds() - GRACE_MARGIN_SECONDS)


def warm_workers() -> bool:
    """Say whether ranks come from a fork server."""
    return os.environ.get(WARM_WORKERS, "1") != "0"


def control_endpoint() -> tuple[str, int] | None:
    """Return host and port of the control store, or None where there is none.

    Raises:
        ConfigError: The variable is set and is not host:port.
    """
    value = os.environ.get(CONTROL)
    return parse_endpoint(value) if value else None


def parse_endpoint(value: str) -> tuple[str, int]:
    host, _, port = value.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise ConfigError.of(
            CONTROL, value, "must be host:port", "set it to where `training control` listens"
        )
    return host, int(port)


def integer(name: str, default: int) -> int:
    """Return a whole number from the environment.

    Raises:
        ConfigError: The variable is set and is no whole number.
    """
    value = os.environ.get(name)
    if not value:
        return default
    if not value.isdecimal():
        raise ConfigError.of(name, value, "must be a whole number", "change it or unset it")
    return int(value)


def free_port() -> int:
    """Return a TCP port of the loopback interface that nothing listens on now."""
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


def short_temporary_directory() -> str:
    """Return where sockets may lie: the path of a Unix socket has at most 107 characters, NVRx's included."""
    directory = tempfile.gettempdir()
    return directory if len(directory) <= _SOCKET_BASE_CHARACTERS else "/tmp"


def leave_exit_code(code: int) -> None:
    """Tell the supervisor of this node that the run must stop with `code`; retryable codes don't count.

    NVRx 0.6.0's launcher only exits 0 or 1, whatever its workers return.
    """
    path = os.environ.get(EXIT_FILE)
    if not path or code not in (EXIT_CONFIG, EXIT_SAME_STEP):
        return
    unfinished = Path(f"{path}.{os.getpid()}")
    unfinished.write_text(str(code))
    unfinished.replace(path)
