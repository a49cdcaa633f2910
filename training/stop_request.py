"""SIGTERM while a rank trains: it finishes its step, and all ranks park together at the same one.

The launcher passes the signal on to its own node's ranks only. They tell the others in the all-reduce of
the step, so a node that is evicted alone takes the whole world to a step whose state is durable.
Outside of the training loop SIGTERM ends a rank at once: there is nothing to save.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from types import FrameType

from training import environment
from training.checkpoint import Checkpointer
from training.exchange import Exchange
from training.state import TrainState

# What is left of the launcher's patience for the end of the process.
_MARGIN_SECONDS = 1.0


class StopRequest:
    """Whether this rank, and whether any rank, was told to stop."""

    def __init__(self) -> None:
        self._until: float | None = None
        self.is_agreed = False
        """All ranks know, at the same step, that they have to stop after it."""

    @contextmanager
    def listening(self) -> Iterator[None]:
        """Take note of SIGTERM instead of dying of it; a rank that was told dies with any error, at once."""
        previous = signal.signal(signal.SIGTERM, self._on_signal)
        try:
            yield
        except BaseException:
            if self._until is not None:
                signal.signal(signal.SIGTERM, signal.SIG_DFL)
                os.kill(os.getpid(), signal.SIGTERM)
            raise
        finally:
            signal.signal(signal.SIGTERM, previous)

    def signal(self) -> float:
        """Return what the other ranks have to know, to be summed over all of them."""
        return float(self._until is not None)

    def learn(self, total: float) -> None:
        """Take the sum of `signal` over all ranks."""
        self.is_agreed |= total > 0

    def seconds_left(self) -> float | None:
        """Return how long this rank may still live, None if nobody has told it to stop."""
        return None if self._until is None else self._until - time.monotonic()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._until = self._until or time.monotonic() + environment.stop_seconds() - _MARGIN_SECONDS


def park(
    checkpointer: Checkpointer,
    state: TrainState,
    request: StopRequest,
    *,
    answer_seconds: float,
    waiting: Callable[[], AbstractContextManager[None]],
) -> bool:
    """Make the state of this step durable, as far as the grace allows; called by all ranks at one step.

    Args:
        checkpointer: Keeper of the state.
        state: The state.
        request: Who was told, and how long they have.
        answer_seconds: Longest wait for the other ranks' answers.
        waiting: Context of a wait for one save.

    Returns:
        Whether it is durable.
    """
    exchange = Exchange(f"park/{checkpointer.lineage}/{state.step}", timeout_seconds=answer_seconds)
    with waiting():
        told = exchange.gather("time to stop", request.seconds_left())
        until = time.time() + min(left for left in told if left is not None)
        checkpointer.finalize(until=until)
    with waiting():
        is_time = exchange.first("time to save", time.time() < until)
        if is_time and not checkpointer.has_begun(state.step):
            checkpointer.maybe_save(state, last=True, until=until)
        failed = checkpointer.finalize(until=until)
    return checkpointer.has_begun(state.step) and not failed
