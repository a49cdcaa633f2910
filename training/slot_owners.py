"""Who may write a shard's slots, and when nobody will ever want them again.

Slots outlive the rank that wrote them, its launcher, and a run that was stopped; memory is too dear to keep
what a dead run has left. A run's slots on this machine are dead once no rank has its shards and the process
that kept its ranks going (`training launch`) is gone. They go when another run starts here. A run whose
ranks had no such keeper is left alone: whether it comes back, nothing here can tell.

Record locks tell it: the kernel drops them with their process, and forks do not inherit them.
"""

from __future__ import annotations

import contextlib
import fcntl
import os
import shutil
import time
from pathlib import Path

from training import environment
from training.errors import RunError
from training.files import listing, write_text

_OWNER_WAIT_SECONDS = 30.0
_POLL_SECONDS = 0.01
_KEEPER = "keeper"


class Owner:
    """The right to write a shard's slots; held as long as the process lives."""

    def __init__(self, directory: Path) -> None:
        """Take it.

        Raises:
            RunError: Another process of this run, a worker that should be gone, still has it.
        """
        directory.mkdir(parents=True, exist_ok=True)
        self._file = os.open(directory / "owner", os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
        deadline = time.monotonic() + _OWNER_WAIT_SECONDS
        while not self._try():
            if time.monotonic() > deadline:
                holder = os.pread(self._file, 100, 0).decode(errors="replace")
                os.close(self._file)
                raise RunError(f"{directory}: slots are written by {holder}; end that process")
            time.sleep(_POLL_SECONDS)
        os.ftruncate(self._file, 0)
        os.pwrite(self._file, f"pid {os.getpid()}".encode(), 0)

    def release(self) -> None:
        os.close(self._file)

    def _try(self) -> bool:
        try:
            # A record lock: a process forked from this one doesn't keep it.
            fcntl.lockf(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except OSError:
            return False
        return True


def keep() -> Path:
    """Be the keeper of all ranks that are started with this process's environment, until it ends.

    Returns:
        The lock file; training.shared_memory removes it when the process is gone.
    """
    path = environment.shared_memory() / f"holdfast-{os.getpid()}-{_KEEPER}"
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_CLOEXEC, 0o600)
    fcntl.lockf(descriptor, fcntl.LOCK_EX)
    os.environ[environment.KEEPER] = str(path)
    return path


def record_keeper(directory: Path) -> None:
    """Note beside a run's slots on this node who keeps its ranks going."""
    record = directory / _KEEPER
    keeper = os.environ.get(environment.KEEPER)
    if keeper:
        write_text(record, keeper)
    else:
        record.unlink(missing_ok=True)


def sweep_dead_runs(root: Path, *, but: str) -> list[Path]:
    """Remove the slots of other runs that are dead; return what is gone.

    Args:
        root: Directory of all runs' slots.
        but: Id of the run that is starting.
    """
    dead = [node for node in listing(root, "*/*") if node.parent.name != but and _is_dead(node)]
    for node in dead:
        shutil.rmtree(node, ignore_errors=True)
        with contextlib.suppress(OSError):  # another node's slots are there, or another rank was quicker
            node.parent.rmdir()
    return dead


def _is_dead(node: Path) -> bool:
    try:
        keeper = (node / _KEEPER).read_text()
    except OSError:  # it has none, or another rank of this node is removing it
        return False
    return not any(_is_locked(path) for path in (Path(keeper), *listing(node, "shard-*/owner")))


def _is_locked(path: Path) -> bool:
    try:
        descriptor = os.open(path, os.O_RDWR | os.O_CLOEXEC)
    except FileNotFoundError:
        return False
    try:
        fcntl.lockf(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except OSError:
        return True
    finally:
        os.close(descriptor)
    return False
