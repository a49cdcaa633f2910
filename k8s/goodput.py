"""The goodput of a run, from the training half's ledger, no more often than is cheap."""

from __future__ import annotations

import time
from pathlib import Path

from training.events import read_events
from training.goodput import ledger

_SHARE_OF_TIME = 0.05  # the ledger reads all events again: give it this part of the time


class Goodput:
    """Remembers the last figure until computing another is cheap against the time that has passed."""

    def __init__(self, run_dir: Path) -> None:
        self._run_dir = run_dir
        self._percent: float | None = None
        self._next = 0.0

    def percent(self) -> float | None:
        """Return the share of wall time that made progress, or None before there is one."""
        now = time.monotonic()
        if now >= self._next:
            self._percent = goodput_percent(self._run_dir)
            spent = time.monotonic() - now
            self._next = now + spent / _SHARE_OF_TIME
        return self._percent


def goodput_percent(run_dir: Path) -> float | None:
    """Return the ledger's figure for all events of a run, or None where there are none."""
    events = read_events(run_dir)
    return 100 * ledger(events).goodput if events else None
