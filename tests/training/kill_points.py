"""Kills a process at every point of what it does at which something that outlives it has changed.

Looked at before each line of the code in question and before each change of a file. Two kills between which
no file has changed, mapped ones included, leave the same behind, so one of them is enough. The points are
counted while the code runs, so none is left out when it changes.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from pathlib import Path
from types import FrameType, ModuleType
from typing import Any, NoReturn

_FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}


Work = Callable[[Callable[[], None]], object]


def every_point(work: Work, *modules: ModuleType, below: Path) -> Iterator[int]:
    """Yield 0, 1, ...: `work` was killed by SIGKILL after the n-th change; the last time it came to its end.

    Args:
        work: What is done, in a process of its own. It calls its argument where points begin to count.
        modules: Whose lines are looked at.
        below: Directory that holds all that outlives the process.
    """
    files = {module.__file__ for module in modules}
    for point in itertools.count():
        pid = os.fork()
        if pid == 0:
            _work_and_die(work, Changes(below, last=point), files)
        _, status = os.waitpid(pid, 0)
        yield point
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0, f"raised before point {point}, see stderr"
            return
        assert os.WTERMSIG(status) == signal.SIGKILL


class Changes:
    """Counts changes of the files below a directory, and ends this process at the last that it may see."""

    def __init__(self, below: Path, *, last: int) -> None:
        self._below, self._left = below, last
        self._contents: dict[str, bytes] | None = None
        self._looking = threading.Lock()

    def look(self) -> None:
        # held already: by another thread, or by this one, whose reading is a file event itself
        if not self._looking.acquire(blocking=False):
            return
        contents = dict(_contents(self._below))
        if self._contents is not None and contents != self._contents:
            self._left -= 1
        if self._left == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        self._contents = contents
        self._looking.release()


def _contents(directory: Path) -> Iterator[tuple[str, bytes]]:
    for parent, names, files in os.walk(directory):
        yield from ((os.path.join(parent, name), b"") for name in names)
        for path in (os.path.join(parent, name) for name in files):
            with contextlib.suppress(FileNotFoundError), open(path, "rb") as file:
                yield path, file.read()


def in_child(work: Callable[[], int]) -> int:
    """Return what `work` returns (0 to 255) in a process that shares nothing with this one."""
    pid = os.fork()
    if pid == 0:
        _exit_after(work)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _work_and_die(work: Work, changes: Changes, files: set[str | None]) -> NoReturn:
    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event in ("line", "return"):
            changes.look()
        return trace

    def begin() -> None:
        sys.addaudithook(lambda event, _: changes.look() if event in _FILE_EVENTS else None)
        threading.settrace(trace)
        sys.settrace(trace)

    _exit_after(lambda: work(begin) and 0)


def _exit_after(work: Callable[[], Any]) -> NoReturn:
    try:
        code = work() or 0
    except BaseException:  # noqa: BLE001 - the end of the process: pytest's own stack lies above
        traceback.print_exc()
        code = 255
    sys.settrace(None)
    os._exit(code)
