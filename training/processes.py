"""Find, reap and end the processes below this one. Linux only."""

from __future__ import annotations

import contextlib
import ctypes
import os
import signal
import time
from collections.abc import Collection
from pathlib import Path

_PR_SET_PDEATHSIG = 1
_PR_SET_CHILD_SUBREAPER = 36


def adopt_orphans() -> None:
    """Become the parent of every orphan below this process, as process 1 of a container is.

    Raises:
        OSError: The kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_CHILD_SUBREAPER)")


def die_with_parent() -> None:
    """Have the kernel end this process when its parent dies.

    Raises:
        OSError: The kernel refuses.
    """
    if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG)")


def descendants(pid: int, *, keep: Collection[int] = ()) -> list[int]:
    """Return the processes below `pid`, zombies included, without those in `keep` and below them."""
    children = _children()
    found: list[int] = []
    queue = [pid]
    while queue:
        below = [child for child in children.get(queue.pop(), []) if child not in keep]
        found += below
        queue += below
    return found


def _children() -> dict[int, list[int]]:
    """Return the children of every process of this machine, or pod."""
    children: dict[int, list[int]] = {}
    for stat in Path("/proc").glob("[0-9]*/stat"):
        with contextlib.suppress(OSError):
            parent = int(stat.read_text().rpartition(")")[2].split()[1])
            children.setdefault(parent, []).append(int(stat.parent.name))
    return children


def end_descendants(*, keep: Collection[int] = ()) -> None:
    """SIGKILL and reap every process below this one, except `keep`; call `adopt_orphans` first."""
    while below := descendants(os.getpid(), keep=keep):
        for pid in below:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        reap_orphans(keep=keep)
        time.sleep(0.01)


def end_tree(pid: int) -> None:
    """SIGKILL a process, which should be stopped, and all below it."""
    while alive := [child for child in descendants(pid) if not _is_zombie(child)]:
        for child in alive:
            with contextlib.suppress(ProcessLookupError):
                os.kill(child, signal.SIGKILL)
        time.sleep(0.01)
    os.kill(pid, signal.SIGKILL)


def _is_zombie(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def reap_orphans(*, keep: Collection[int] = ()) -> None:
    """Collect children that have ended, except `keep`, whose status somebody else collects."""
    with contextlib.suppress(ChildProcessError):
        while ended := os.waitid(os.P_ALL, 0, os.WEXITED | os.WNOHANG | os.WNOWAIT):
            if ended.si_pid in keep:
                # The kernel shows this one again and again, and none behind it
                _reap_each(keep)
                return
            os.waitpid(ended.si_pid, os.WNOHANG)


def _reap_each(keep: Collection[int]) -> None:
    for pid in _children().get(os.getpid(), []):
        if pid not in keep:
            with contextlib.suppress(ChildProcessError):
                os.waitpid(pid, os.WNOHANG)
