"""Live lines about a run, from its events."""

from __future__ import annotations

import json
import signal
import time
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from typing import Any, TextIO

from training.config import JobConfig

Event = Mapping[str, Any]


class Progress:
    """Prints what happens in a run, one line an event that people want to know of."""

    def __init__(self, config: JobConfig, *, file: TextIO) -> None:
        self._steps, self._file = config.training.steps, file
        self._every_steps = max(1, config.training.steps // 6)

    def watch(self, run_dir: Path) -> Callable[[], None]:
        """Return a function that prints what has happened since its last call."""
        tail, started = EventTail(run_dir), time.time()
        shown: set[str] = set()

        def show() -> None:
            for event in tail.read():
                line = self._line(event)
                if line and line not in shown:
                    shown.add(line)
                    self._print(f"{run_dir.name:11} {event['time'] - started:6.1f} s  {line}")

        return show

    def say(self, text: str) -> None:
        self._print(text)

    def _print(self, text: str) -> None:
        print(text, file=self._file, flush=True)

    def _line(self, event: Event) -> str:
        kind = event["event"]
        if kind == "metrics":
            return self._step_line(event)
        if kind == "fault":
            where = f"rank {event['rank']}, step {event['step']}, {event['point']}"
            return f"FAULT {event['kind']}: {where}"
        if kind == "worker_exit" and event["signal"] and not event["stopped"]:
            return f"rank {event['rank']} died of {signal.Signals(event['signal']).name}"
        if kind == "reentry":
            return f"in-process restart {event['iteration']} in round {event['round']}"
        if kind == "round":
            ranks = len(event["workers"])
            return f"{event['node']}: round {event['round']}, {ranks} ranks started"
        if kind == "restored" and event["rank"] == 0:
            name = Path(str(event["source"])).name
            return f"state of step {event['step']} restored ({name})"
        return ""

    def _step_line(self, event: Event) -> str:
        last = event["step"] == self._steps
        if event["rank"] != 0 or (event["step"] % self._every_steps and not last):
            return ""
        return f"step {event['step']}/{self._steps}  loss {event['loss']:.4f}"


class EventTail:
    """Reads the events that were appended to a run's log since the last read."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "events"
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[Event]:
        """Return new events, ordered by time."""
        fresh = [event for path in sorted(self._directory.glob("*.jsonl")) for event in self._of(path)]
        return sorted(fresh, key=lambda event: float(event["time"]))

    def _of(self, path: Path) -> Iterator[Event]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            data = file.read()
        whole = data.rfind(b"\n") + 1
        self._offsets[path] = self._offsets.get(path, 0) + whole
        for line in data[:whole].splitlines():
            yield json.loads(line)
