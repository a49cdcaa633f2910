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


def interval_for(*, cost_seconds: float, step_seconds: float) -> int:
    """Return the smallest interval in steps at which snapshots cost at most `COST_LIMIT`."""
    if cost_seconds <= _FREE * step_seconds:
        return 1
    return max(1, math.ceil(cost_seconds / (COST_LIMIT * step_seconds)))


@dataclass(kw_only=True, slots=True)
class Cadence:
    """Decides when a snapshot is due. All ranks decide the same at the same step.

    With "auto" the first steps have a snapshot each; a rank's own measurements go to `offer`, the sums over
    all ranks come back to `decide`.
    """

    setting: int | Literal["auto"]
    every_steps: int = 1
    decided: bool = False
    _costs: list[float] = field(default_factory=list)
    _steps: list[float] = field(default_factory=list)
    _last: float | None = None

    def __post_init__(self) -> None:
        self.reset()

    def reset(self) -> None:
        """Begin again after a restore: a rank that is new has measured nothing."""
        self.decided = self.setting != "auto"
        self.every_steps = 1 if self.setting == "auto" else self.setting
        self._costs, self._steps, self._last = [], [], None

    def due(self, step: int) -> bool:
        return self.every_steps > 0 and step % self.every_steps == 0

    def measure(self, *, now: float, costs_seconds: Sequence[float]) -> None:
        """Take one step's measurements.

        Args:
            now: Monotonic time at the end of the step.
            costs_seconds: Waits for snapshots that ended since the last call.
        """
        if self._last is not None:
            self._steps.append(now - self._last)
        self._last = now
        self._costs.extend(costs_seconds)

    def offer(self) -> tuple[float, float, float]:
        """Return (1 if there are enough measurements, median cost, median step) for the sum over ranks.

        Not means: one step that waited for something else, an evaluation say, would outweigh all others.
        """
        costs, steps = self._costs[_WARM_UP:], self._steps[_WARM_UP:]
        if self.decided or min(len(costs), len(steps)) < _SAMPLES:
            return 0.0, 0.0, 0.0
        return 1.0, statistics.median(costs), statistics.median(steps)

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
