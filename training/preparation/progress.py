"""One line of progress on a terminal, or a line now and then in a log."""

from __future__ import annotations

import time
from typing import TextIO

_TERMINAL_SECONDS = 0.2
_LOG_SECONDS = 10.0


class Progress:
    """Shows how far a task is, how fast it goes and when it will be done."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream
        self._terminal = stream.isatty()
        self._label = ""
        self._total = self._done = self._fresh = 0
        self._started = self._shown = 0.0

    def start(self, label: str, total: int) -> None:
        """Begin a task of `total` units; 0 if nobody knows."""
        self._label, self._total, self._done, self._fresh = label, total, 0, 0
        self._started = self._shown = time.monotonic()

    def advance(self, units: int, *, fresh: bool = True) -> None:
        """Count units done; those not `fresh` were done by an earlier run and say nothing about speed."""
        self._done += units
        self._fresh += units if fresh else 0
        interval = _TERMINAL_SECONDS if self._terminal else _LOG_SECONDS
        if time.monotonic() - self._shown >= interval:
            self._shown = time.monotonic()
            self._write(self._line(), end="" if self._terminal else "\n")

    def finish(self) -> None:
        """End the task with a line that stays."""
        seconds = time.monotonic() - self._started
        self._write(f"{self._label}: done in {seconds:.1f} s", end="\n")

    def _line(self) -> str:
        seconds = time.monotonic() - self._started
        share = f"{self._done / self._total:4.0%}" if self._total else f"{self._done}"
        if not (self._total and self._fresh):
            return f"{self._label}: {share}"
        left = seconds * max(0, self._total - self._done) / self._fresh
        return f"{self._label}: {share}, {int(left) // 60}:{int(left) % 60:02d} left"

    def _write(self, line: str, *, end: str) -> None:
        start = "\r\x1b[K" if self._terminal else ""
        self._stream.write(f"{start}{line}{end}")
        self._stream.flush()
