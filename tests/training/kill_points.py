"""Kills a process at every point of what it does: each line of the code in question, each change of a file.

The points are counted while the code runs, so none is left out when it changes.
"""

from __future__ import annotations

import itertools
import os
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Iterator
from types import FrameType, ModuleType
from typing import Any, NoReturn

_FILE_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "os.truncate", "shutil.rmtree"}


Work = Callable[[Callable[[], None]], object]


def every_point(work: Work, *modules: ModuleType) -> Iterator[int]:
    """Yield 0, 1, ...: `work` was killed at its n-th point by SIGKILL; the last time it came to its end.

    Args:
        work: What is done, in a process of its own. It calls its argument where points begin to count.
        modules: Whose lines count.
    """
    files = {module.__file__ for module in modules}
    for point in itertools.count():
        pid = os.fork()
        if pid == 0:
            _work_and_die(work, point, files)
        _, status = os.waitpid(pid, 0)
        yield point
        if not os.WIFSIGNALED(status):
            assert os.waitstatus_to_exitcode(status) == 0, f"raised before point {point}, see stderr"
            return
        assert os.WTERMSIG(status) == signal.SIGKILL


def in_child(work: Callable[[], int]) -> int:
    """Return what `work` returns (0 to 255) in a process that shares nothing with this one."""
    pid = os.fork()
    if pid == 0:
        _exit_after(work)
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


def _work_and_die(work: Work, point: int, files: set[str | None]) -> NoReturn:
    seen = itertools.count()

    def count() -> None:
        if next(seen) == point:
            os.kill(os.getpid(), signal.SIGKILL)

    def trace(frame: FrameType, event: str, _: Any) -> Any:
        if frame.f_code.co_filename not in files:
            return None
        if event == "line":
            count()
        return trace

    def begin() -> None:
        sys.addaudithook(lambda event, _: count() if event in _FILE_EVENTS else None)
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
