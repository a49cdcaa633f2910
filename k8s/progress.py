"""Where a run stands, folded from its events one at a time.

A run of weeks writes gigabytes of events, so nothing is read twice: `EventTail` remembers how far it
has read each file, and `Progress` keeps only what the status shows. Rank 0 stands for all ranks: every
step, re-entry and restart of the world passes through it, whichever process is rank 0 at that time.
"""

from __future__ import annotations

import json
import signal
from collections import Counter, deque
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from training.errors import EXIT_DONE

_SPEED_WINDOW_STEPS = 20


@dataclass(frozen=True, kw_only=True, slots=True)
class Restarts:
    """How often each layer has acted in the whole run."""

    in_process: int = 0
    """Training function called again in living processes."""
    in_job: int = 0
    """Ranks started again as new processes."""
    launcher: int = 0
    """Launcher started again in its pod."""
    pod: int = 0
    """Pods made again while the run was going."""
    causes: dict[str, int] = field(default_factory=dict)
    """Exceptions and signals that began a restart, and how often."""


@dataclass(frozen=True, kw_only=True, slots=True)
class RunStatus:
    """What the events of a run say."""

    steps: int
    """Steps of the whole run."""
    step: int = 0
    loss: float | None = None
    evaluation_loss: float | None = None
    tokens_per_second: float | None = None
    eta_seconds: float | None = None
    durable_step: int | None = None
    memory_step: int | None = None
    """Newest step with a snapshot in host memory."""
    failed_saves: int = 0
    """Durable checkpoints that were given up; training went on."""
    skipped_updates: int = 0
    """Steps whose loss was not finite, and which changed nothing."""
    goodput_percent: float | None = None
    restarts: Restarts = field(default_factory=Restarts)
    ranks: dict[str, str] = field(default_factory=dict)
    """Node that each rank runs on now."""
    done: bool = False
    exit_code: int | None = None
    """How the run's nodes have ended; None while one of them goes on."""
    updated: float = 0.0
    """Time of the newest event, seconds since the epoch."""


class EventTail:
    """Reads what has been appended to a run's event files since the last time."""

    def __init__(self, run_dir: Path) -> None:
        self._directory = run_dir / "events"
        self._offsets: dict[Path, int] = {}

    def read(self) -> list[dict[str, Any]]:
        """Return the new events, ordered by time."""
        events: list[dict[str, Any]] = []
        for path in sorted(self._directory.glob("*.jsonl")):
            events.extend(self._read_file(path))
        return sorted(events, key=lambda event: float(event["time"]))

    def _read_file(self, path: Path) -> Iterator[dict[str, Any]]:
        with path.open("rb") as file:
            file.seek(self._offsets.get(path, 0))
            whole, newline, _ = file.read().rpartition(b"\n")  # the last line may still be in writing
        self._offsets[path] = self._offsets.get(path, 0) + len(whole) + len(newline)
        for line in whole.splitlines():
            try:
                yield json.loads(line)
            except json.JSONDecodeError:
                continue  # torn by a kill, and the file was appended to afterwards


class Progress:
    """Takes events in order of time and tells the status."""

    def __init__(self, *, steps: int, pods: int) -> None:
        """Start with nothing known.

        Args:
            steps: Steps of the whole run.
            pods: Nodes and spares; more first launches of one Job than these are replaced pods.
        """
        self._steps, self._pods, self._step = steps, pods, 0
        self._last: dict[str, Any] = {}
        self._recent: deque[tuple[int, float, int]] = deque(maxlen=_SPEED_WINDOW_STEPS)
        self._counts: Counter[str] = Counter()
        self._causes: Counter[str] = Counter()
        self._failed_attempts: set[tuple[int, int]] = set()
        self._failed_saves: set[int] = set()
        self._ranks: dict[str, str] = {}
        self._nodes: set[str] = set()
        """Nodes that have had a rank."""
        self._supervisors: dict[tuple[str, int], int | None] = {}
        self._updated = 0.0
        self._done = False

    def add(self, event: dict[str, Any]) -> None:
        """Take one event; kinds that the status does not show are left aside."""
        self._updated = max(self._updated, float(event["time"]))
        handler = _HANDLERS.get(event["event"])
        if handler is not None:
            handler(self, event)

    def status(self, *, goodput_percent: float | None = None) -> RunStatus:
        """Return what is known now."""
        speed = self._steps_per_second()
        return RunStatus(
            steps=self._steps,
            step=self._step,
            loss=self._last.get("loss"),
            evaluation_loss=self._last.get("evaluation_loss"),
            tokens_per_second=speed * self._recent[-1][2] if speed else None,
            eta_seconds=max(0, self._steps - self._step) / speed if speed else None,
            durable_step=self._last.get("durable_step"),
            memory_step=self._last.get("memory_step"),
            failed_saves=len(self._failed_saves),
            skipped_updates=self._last.get("skipped", 0),
            goodput_percent=goodput_percent,
            restarts=self._restarts(),
            ranks=dict(sorted(self._ranks.items(), key=lambda item: int(item[0]))),
            done=self._done,
            exit_code=self._exit_code(),
            updated=self._updated,
        )

    def _restarts(self) -> Restarts:
        return Restarts(
            in_process=self._counts["reentry"],
            in_job=max(0, self._counts["enter"] - max(1, self._counts["job"])),
            launcher=self._counts["relaunch"],
            pod=max(0, self._counts["launch"] - self._counts["job"] * self._pods),
            causes=dict(self._causes),
        )

    def _exit_code(self) -> int | None:
        # a supervisor that went with its node tells no exit: its ranks are elsewhere by then
        replaced = self._nodes - set(self._ranks.values())
        going = [
            node
            for (node, _), code in self._supervisors.items()
            if code is None and node not in replaced and not (self._done and node not in self._nodes)
        ]
        ended = [code for code in self._supervisors.values() if code is not None]
        if going or not ended:
            return None
        return EXIT_DONE if self._done else max(ended)

    def _steps_per_second(self) -> float | None:
        if len(self._recent) < 2:
            return None
        seconds = self._recent[-1][1] - self._recent[0][1]
        return (len(self._recent) - 1) / seconds if seconds > 0 else None

    def _on_step(self, event: dict[str, Any]) -> None:
        if event.get("rank") != 0:
            return
        self._step = event["step"]
        self._recent.append((self._step, float(event["time"]), event["tokens"]))

    def _on_metrics(self, event: dict[str, Any]) -> None:
        if event.get("rank") == 0:
            self._last["loss"] = event["loss"]

    def _on_evaluation(self, event: dict[str, Any]) -> None:
        self._last["evaluation_loss"] = event["loss"]

    def _on_checkpoint(self, event: dict[str, Any]) -> None:
        known = {"committed": "durable_step", "snapshot": "memory_step"}
        if event["status"] in known:
            self._last[known[event["status"]]] = event["step"]
        elif event["status"] == "failed":
            self._failed_saves.add(event["step"])  # each rank may tell

    def _on_non_finite(self, event: dict[str, Any]) -> None:
        self._last["skipped"] = event["skipped"]

    def _on_restored(self, event: dict[str, Any]) -> None:
        if event["rank"] == 0:
            self._step = event["step"]
            # a restore from elsewhere invalidates the newer snapshots, which were of another lineage
            self._last["memory_step"] = self._step if event["source"] == "memory" else None

    def _on_enter(self, event: dict[str, Any]) -> None:
        self._ranks[str(event["rank"])] = event["node"]
        self._nodes.add(event["node"])
        self._restarted(event, "enter")

    def _on_reentry(self, event: dict[str, Any]) -> None:
        self._restarted(event, "reentry")

    def _restarted(self, event: dict[str, Any], kind: str) -> None:
        if event["rank"] == 0:
            self._counts[kind] += 1
            self._recent.clear()  # the speed of training, not of the restart

    def _on_exception(self, event: dict[str, Any]) -> None:
        # the first rank to fail is the cause; the others follow it
        attempt = (event.get("round", 0), event.get("iteration", 0))
        if attempt not in self._failed_attempts:
            self._failed_attempts.add(attempt)
            self._causes[event["type"]] += 1

    def _on_worker_exit(self, event: dict[str, Any]) -> None:
        if event.get("signal") and not event.get("stopped"):
            self._causes[_signal_name(event["signal"])] += 1

    def _on_launch(self, event: dict[str, Any]) -> None:
        if event.get("attempt"):
            self._counts["relaunch"] += 1
            return
        if not self._supervisors or self._exit_code() is not None:  # nobody lives: another Job of this run
            self._supervisors.clear()
            self._ranks.clear()
            self._nodes.clear()
            self._done = False
            self._counts["job"] += 1
        killed = [key for key, code in self._supervisors.items() if key[0] == event["node"] and code is None]
        for key in killed:
            del self._supervisors[key]
        self._supervisors[event["node"], event["pid"]] = None
        self._counts["launch"] += 1

    def _on_exit(self, event: dict[str, Any]) -> None:
        self._supervisors[event["node"], event["pid"]] = event["exit_code"]

    def _on_done(self, event: dict[str, Any]) -> None:
        self._done = True


def _signal_name(number: int) -> str:
    try:
        return signal.Signals(number).name
    except ValueError:  # real-time signals between the first and the last have no name
        return f"signal {number}"


_HANDLERS = {
    "step": Progress._on_step,
    "metrics": Progress._on_metrics,
    "evaluation": Progress._on_evaluation,
    "checkpoint": Progress._on_checkpoint,
    "non_finite": Progress._on_non_finite,
    "restored": Progress._on_restored,
    "enter": Progress._on_enter,
    "reentry": Progress._on_reentry,
    "exception": Progress._on_exception,
    "worker_exit": Progress._on_worker_exit,
    "launch": Progress._on_launch,
    "exit": Progress._on_exit,
    "done": Progress._on_done,
}
