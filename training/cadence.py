"""How often to take a snapshot: at every step where that is free, else as often as costs 0.5%."""

from __future__ import annotations

import math
import statistics
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Literal

COST_LIMIT = 0.005
# A snapshot that holds training up for less than this share of a step is free: the noise of a step is larger
_FREE = 0.001
_WARM_UP = 2
_SAMPLES = 6
# steps in a row with a snapshot each, or without; the first of them still feel the block before
_BLOCK = 5
_UNSETTLED = 2


def interval_for(*, cost_seconds: float, step_seconds: float) -> int:
    """Return the smallest interval in steps at which snapshots cost at most `COST_LIMIT`."""
    if cost_seconds <= _FREE * step_seconds:
        return 1
    return max(1, math.ceil(cost_seconds / (COST_LIMIT * step_seconds)))


@dataclass(kw_only=True, slots=True)
class Cadence:
    """Decides when a snapshot is due. All ranks decide the same at the same step.

    With "auto" the first steps are measured; a rank's own measurements go to `offer`, the sums over all ranks
    come back to `decide`. Where copies are made in the background, what they cost is the difference between
    steps with and without: a copy slows kernels that never wait for it.
    """

    setting: int | Literal["auto"]
    in_background: bool = False
    """Whether a snapshot is copied while training goes on; else training waits, and the wait is known."""
    every_steps: int = 1
    decided: bool = False
    _costs: list[float] = field(default_factory=list)
    _steps: list[float] = field(default_factory=list)
    _plain_steps: list[float] = field(default_factory=list)
    _last: float | None = None
    _number: int = 0

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again after a restore: a rank that is new has measured nothing."""
        self.decided = self.setting != "auto"
        self.every_steps = 1 if self.setting == "auto" else self.setting
        self._costs, self._steps, self._plain_steps = [], [], []
        self._last, self._number = None, 0

    def due(self, step: int) -> bool:
        if not self.decided and self.in_background:
            return self._block_has_snapshots
        return self.every_steps > 0 and step % self.every_steps == 0

    def measure(self, *, now: float, costs_seconds: Sequence[float]) -> None:
        """Take one step's measurements, from the first step on at which all slots are there.

        Args:
            now: Monotonic time at the end of the step.
            costs_seconds: Waits for snapshots that ended since the last call.
        """
        if self._last is not None:
            self._sort(now - self._last)
        self._last = now
        self._costs.extend(costs_seconds)

    def offer(self) -> tuple[float, float, float]:
        """Return (1 if there are enough measurements, median cost, median step) for the sum over ranks.

        Not means: one step that waited for something else, an evaluation say, would outweigh all others.
        """
        costs, steps = self._costs[_WARM_UP:], self._steps[_WARM_UP:]
        if self.in_background:
            costs, steps = self._steps, self._plain_steps
        if self.decided or min(len(costs), len(steps)) < _SAMPLES:
            return 0.0, 0.0, 0.0
        cost, step = statistics.median(costs), statistics.median(steps)
        return 1.0, max(0.0, cost - step) if self.in_background else cost, step

    @property
    def _block_has_snapshots(self) -> bool:
        return self._number // _BLOCK % 2 == 0

    def _sort(self, seconds: float) -> None:
        if not self.in_background:
            self._steps.append(seconds)
            return
        if self._number % _BLOCK >= _UNSETTLED:
            (self._steps if self._block_has_snapshots else self._plain_steps).append(seconds)
        self._number += 1

    def decide(self, offers: tuple[float, float, float], *, ranks: int) -> str | None:
        """Choose the interval once all ranks have offered; return the reason, None if it is too early."""
        offered, cost, step = offers
        if self.decided or offered < ranks:
            return None
        cost_seconds, step_seconds = cost / ranks, step / ranks
        self.every_steps = interval_for(cost_seconds=cost_seconds, step_seconds=step_seconds)
        self.decided = True
        share = cost_seconds / step_seconds / self.every_steps
        return (
            f"a snapshot holds a step of {step_seconds * 1e3:.1f} ms up for {cost_seconds * 1e3:.2f} ms: "
            f"every {self.every_steps} steps cost {share:.2%}"
        )
