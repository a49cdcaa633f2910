"""NVRx's persistent worker process as the savers use it: started early, watched, replaced when it dies.

The training thread hands it a function and finds the outcome in shared memory: no collective, no wait.
"""

from __future__ import annotations

import json
import logging
import multiprocessing
import os
import signal
from collections.abc import Callable
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.files import write_json
from training.processes import die_with_parent

logger = logging.getLogger(__name__)

# SIGKILL ends it in milliseconds, unless it is in a system call that storage does not answer
_KILL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a rank's part of a save has ended."""

    step: int
    failure: str = ""


class DrainWorker:
    """One worker process of this rank."""

    def __init__(self, what: str) -> None:
        self._what = what
        self._queue: Any = None

    def start(self) -> None:
        """Start it unless it runs; returns before the process is ready."""
        if self._queue is None:
            self._start()

    def submit(self, function: Callable[..., Any], *arguments: Any) -> None:
        """Have it call a function; a worker that has died is replaced."""
        if not self._is_alive():
            logger.warning("%s worker died: started again (costs seconds of this save)", self._what)
            self.restart()
        self._schedule(function, *arguments)

    def outcome(self, path: Path, step: int) -> Outcome | None:
        """Return how what was submitted last has ended, None while it goes on."""
        self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        if self._queue.get_num_unfinalized_calls() == 0:
            return read_outcome(path, step) or Outcome(step=step, failure="its worker left no outcome")
        # a dead worker never answers: NVRx would wait for ever (Megatron-LM#6970)
        return None if self._is_alive() else Outcome(step=step, failure="its worker died")

    def abandon(self) -> None:
        """Give up what it does."""
        if self._queue is not None and self._queue.get_num_unfinalized_calls():
            self.restart()

    def restart(self) -> None:
        self._kill()
        self._start()

    def close(self) -> None:
        # not NVRx's orderly end: that waits for ever if the worker dies before it hears of it
        if self._queue is not None:
            self._kill()
            self._queue = None

    def _kill(self) -> None:
        """End it at once: NVRx would first wait for an orderly end, and then for the end without a limit."""
        caller = self._queue.persistent_caller
        process = caller.process if caller is not None else None
        if process is not None:
            for queue in (caller.queue, caller.preload_q):
                queue.cancel_join_thread()
            process.kill()
            process.join(_KILL_SECONDS)
            caller.process = None
            if process.is_alive():
                logger.warning(
                    "%s worker: SIGKILL did not end it, it waits for storage: left behind", self._what
                )
                multiprocessing.process._children.discard(process)  # type: ignore[attr-defined]
        self._queue.async_calls.clear()
        self._queue.close(abort=True)

    def _start(self) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        # cpu_shm_mode: the worker opens no CUDA context, it reads the slot in host memory
        self._queue = AsyncCallsQueue(persistent=True, cpu_shm_mode=True)
        self._schedule(_die_with_rank)

    def _is_alive(self) -> bool:
        caller = self._queue.persistent_caller
        return caller is not None and caller.process is not None and caller.process.is_alive()

    def _schedule(self, function: Callable[..., Any], *arguments: Any) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest

        self._queue.schedule_async_request(AsyncRequest(function, arguments, []))


def _die_with_rank() -> None:
    """End this process with its rank: NVRx's worker would wait for ever."""
    die_with_parent()
    # it may have died before that; not the parent's pid, which is that of a fork server
    parent = multiprocessing.parent_process()
    if parent is not None and not parent.is_alive():
        os.kill(os.getpid(), signal.SIGKILL)


def leave_outcome(path: Path, outcome: Outcome) -> None:
    """Tell the training thread how a save has ended."""
    write_json(path, asdict(outcome))


def read_outcome(path: Path, step: int) -> Outcome | None:
    """Return how the save of a step has ended, None if the worker has not said so."""
    try:
        outcome = Outcome(**json.loads(path.read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return outcome if outcome.step == step else None
