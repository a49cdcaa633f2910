"""The goodput ledger: where the wall time of a run went, from its event log alone.

    python -m training goodput RUN_DIR [--json]

Goodput is the time of optimizer steps that are part of the final state, divided by wall time. Every other
part is measured by itself, between events that are its own; what no event explains is the residual, which
is printed and not added to anything.

    start        the run's first sign of life until the process that all others waited for
    imports, layers, rendezvous, build, load    of every generation, the first included; layers is the
                 set-up of the in-process restart layer
    productive   steps on the lineage that survived
    lost work    steps that a restart threw away, and the step that a fault interrupted
    save         the training thread held up by checkpoints
    evaluate
    detect       from a fault to its first sign: an exception, a dead process, a hang limit
    restart      from that sign until processes are new, or have entered the training function again
    idle         a node without a launcher: its pod is being made again, or the run was stopped
    finalize     waiting for the last checkpoint
    stop         from the last rank's end to the end of the launchers
"""

from __future__ import annotations

import argparse
import json
import sys
from collections import Counter
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.errors import EXIT_DONE, ConfigError
from training.events import read_events
from training.timeline import STEP, Attempt, Event, Generation, Interval, generations, surviving_limits

PARTS = (
    "productive",
    "lost work",
    "save",
    "evaluate",
    "detect",
    "restart",
    "idle",
    "start",
    "imports",
    "layers",
    "rendezvous",
    "build",
    "load",
    "finalize",
    "stop",
)
# Of a recovery. Together with "lost work" and "first step" they are the ledger's parts, some split in two.
PHASES = (
    "detect",
    "stop",
    "restart",
    "idle",
    "imports",
    "layers",
    "rendezvous",
    "build",
    "load",
    "verify",
    "first step",
)

_SIGNS = ("worker_exit", "launcher_exit", "exit", "reentry", "round")
_BAR_WIDTH = 40


@dataclass(frozen=True, kw_only=True, slots=True)
class Restart:
    """One recovery."""

    layer: str
    """in-process, in-job, or launcher."""
    fault: str
    """Kind of the planned fault; empty if nobody planned it."""
    fault_index: int | None
    """Number of that fault in the plan."""
    step: int
    """Last step that was finished before."""
    restored_step: int | None
    """Step that training went on from; None as long as it has not."""
    source: str
    """Tier that the state came from, such as memory or durable; empty for a start from nothing."""
    began: float
    """When it began: the fault, or the last sign of progress where nobody planned one."""
    resumed: float
    """When the first new step was done; of a recovery that was disturbed before, when it ended."""
    lost_work_seconds: float
    """Time in the step that was interrupted."""
    phases: Mapping[str, float]
    """Seconds by phase, from the fault to the end of the first new step."""

    @property
    def steps_lost(self) -> int:
        return 0 if self.restored_step is None else max(0, self.step - self.restored_step)

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Goodput:
    """Where the wall time of a run went."""

    wall_seconds: float
    parts: Mapping[str, float]
    """Seconds by part, in the order of `PARTS`."""
    steps: int
    """Optimizer steps that survived."""
    steps_lost: int
    restarts: tuple[Restart, ...]
    finished: bool
    """The last step is durable."""

    @property
    def goodput(self) -> float:
        """Productive share of wall time, 0 to 1."""
        return self.parts["productive"] / self.wall_seconds if self.wall_seconds else 0.0

    @property
    def residual_seconds(self) -> float:
        """Wall time that no event explains."""
        return self.wall_seconds - sum(self.parts.values())

    @property
    def residual(self) -> float:
        """Share of wall time that no event explains, 0 to 1."""
        return self.residual_seconds / self.wall_seconds if self.wall_seconds else 0.0

    def restarts_by_layer(self) -> dict[str, int]:
        return dict(Counter(restart.layer for restart in self.restarts))

    def as_dict(self) -> dict[str, Any]:
        restarts = [{**asdict(r), "steps_lost": r.steps_lost, "seconds": r.seconds} for r in self.restarts]
        return {
            "wall_seconds": self.wall_seconds,
            "goodput": self.goodput,
            "parts": dict(self.parts),
            "residual_seconds": self.residual_seconds,
            "residual": self.residual,
            "steps": self.steps,
            "steps_lost": self.steps_lost,
            "restarts_by_layer": self.restarts_by_layer(),
            "restarts": restarts,
            "finished": self.finished,
        }


def ledger(events: Sequence[Event]) -> Goodput:
    """Account for the time between the first and the last event of a run.

    Args:
        events: As returned by `read_events`.
    """
    if not events:
        nothing = dict.fromkeys(PARTS, 0.0)
        return Goodput(wall_seconds=0.0, parts=nothing, steps=0, steps_lost=0, restarts=(), finished=False)
    return _Ledger(events).result()


class _Ledger:
    """Walks along the line of time; `_reached` is how far it is accounted for."""

    def __init__(self, events: Sequence[Event]) -> None:
        self._events = _until_done(events)
        self._generations = generations(self._events)
        self._signs = self._times(*_SIGNS)
        self._exits, self._launches = self._times("exit"), self._times("launch")
        self._ends = self._times("worker_exit")
        self._done = self._times("done")
        self._limits = surviving_limits(self._generations)
        self._begin = min(float(event.get("born", event["time"])) for event in self._events)
        self._end = max(float(event["time"]) for event in self._events)
        self._reached = self._begin
        self._parts = dict.fromkeys(PARTS, 0.0)
        self._restarts: list[Restart] = []

    def result(self) -> Goodput:
        for number, generation in enumerate(self._generations):
            if number:
                self._account_restart(self._generations[number - 1], generation)
            else:
                self._add("start", self._begin, generation.critical.began)
            self._account_generation(generation, self._limits[number])
        finished = self._account_end()
        survived, lost = self._count_steps()
        return Goodput(
            wall_seconds=self._end - self._begin,
            parts=self._parts,
            steps=survived,
            steps_lost=lost,
            restarts=tuple(self._restarts),
            finished=finished,
        )

    def _times(self, *kinds: str) -> list[float]:
        return [float(event["time"]) for event in self._events if event["event"] in kinds]

    def _add(self, part: str, start: float, end: float) -> float:
        """Book [start, end), less what is booked already, and return the seconds booked."""
        start = max(start, self._reached)
        if end <= start:
            return 0.0
        self._reached = end
        self._parts[part] = self._parts.get(part, 0.0) + end - start
        return end - start

    def _account_generation(self, generation: Generation, limit: float) -> None:
        for interval in generation.critical.intervals:
            self._add(_part_of(interval, limit), interval.start, interval.end)

    def _account_restart(self, before: Generation, after: Generation) -> None:
        lost_work, phases = self._account_interruption(before, after.critical.began)
        began = self._reached - sum(phases.values())
        for interval in after.critical.intervals:
            if interval.name in PHASES:
                phases[interval.name] += self._add(interval.name, interval.start, interval.end)
        verify = min(_verify_seconds(after.critical), phases["load"])
        phases["load"], phases["verify"] = phases["load"] - verify, verify
        first = after.critical.first_step
        phases["first step"] = first.end - max(first.start, self._reached) if first else 0.0
        fault = before.faults[0] if before.faults else {}
        restoration = after.critical.restoration or {}
        self._restarts.append(
            Restart(
                layer=self._layer(before, after),
                fault=fault.get("kind", ""),
                fault_index=fault.get("index"),
                step=max(before.finished_steps, default=before.base or 0),
                restored_step=after.base,
                source=str(restoration.get("source", "")),
                began=began,
                resumed=first.end if first else self._reached,
                lost_work_seconds=lost_work,
                phases=phases,
            )
        )

    def _account_interruption(self, generation: Generation, until: float) -> tuple[float, dict[str, float]]:
        """Book the time from the last progress of a generation to the next one's beginning.

        Returns:
            Seconds of lost work, and seconds by phase.
        """
        fault = float(generation.faults[0]["time"]) if generation.faults else self._reached
        sign = self._first_sign(generation, until)
        phases = dict.fromkeys(PHASES, 0.0)
        lost_work = self._add("lost work", self._reached, min(fault, until))
        phases["detect"] = self._add("detect", self._reached, sign)
        stopped = max((time for time in self._ends if sign <= time < until), default=sign)
        phases["stop"] = self._add("restart", sign, stopped)
        for gone, back in self._pauses(stopped, until):
            phases["restart"] += self._add("restart", stopped, gone)
            phases["idle"] += self._add("idle", gone, back)
        phases["restart"] += self._add("restart", stopped, until)
        return lost_work, phases

    def _pauses(self, start: float, end: float) -> list[tuple[float, float]]:
        """Return when a node was without a launcher: from its exit to the next launch on any node."""
        gone = [time for time in self._exits if start <= time < end]
        back = [time for time in self._launches if gone and max(gone) < time < end]
        return [(max(gone), min(back))] if back else []

    def _first_sign(self, generation: Generation, until: float) -> float:
        after = generation.cause["time"] if generation.cause else generation.began_to_train
        signs = self._signs + [float(e["time"]) for e in generation.exceptions]
        return min((time for time in signs if after <= time <= until), default=until)

    def _layer(self, before: Generation, after: Generation) -> str:
        if after.critical.process in before.processes:
            return "in-process"
        again = any(before.began_to_train < time < after.critical.began for time in self._launches)
        return "launcher" if again else "in-job"

    def _account_end(self) -> bool:
        """Book what follows the last generation; return whether the run is done."""
        if self._done:
            self._add("stop", max(self._done), self._end)
        elif self._generations and self._was_interrupted():
            self._account_interruption(self._generations[-1], self._end)
        return bool(self._done)

    def _was_interrupted(self) -> bool:
        last = self._generations[-1]
        return bool(last.cause or last.exceptions) or self._first_sign(last, self._end) < self._end

    def _count_steps(self) -> tuple[int, int]:
        """Return how many steps survived and how many were lost."""
        survived: set[int] = set()
        lost = 0
        for generation, limit in zip(self._generations, self._limits, strict=True):
            kept = {step for step in generation.finished_steps if step <= limit}
            lost += len(generation.finished_steps) - len(kept)
            survived |= kept
        return len(survived), lost


def _until_done(events: Sequence[Event]) -> Sequence[Event]:
    """Leave out what happened when a run that was done was started again."""
    done = [float(event["time"]) for event in events if event["event"] == "done"]
    for number, event in enumerate(events):
        if done and event["event"] == "launch" and event["time"] > max(done):
            return events[:number]
    return events


def _verify_seconds(attempt: Attempt) -> float:
    phases = attempt.restoration.get("phases", {}) if attempt.restoration else {}
    return float(phases.get("verify", 0.0))


def _part_of(interval: Interval, limit: float) -> str:
    if interval.name != STEP:
        return interval.name
    return "productive" if (interval.step or 0) <= limit else "lost work"


def main(arguments: Sequence[str]) -> int:
    """Run `training goodput RUN_DIR [--json]` and return its exit code."""
    parser = argparse.ArgumentParser(
        prog="python -m training goodput", description="Show where the wall time of a run went."
    )
    parser.add_argument("run_dir", type=Path, help="directory of a run, such as runs/NAME")
    parser.add_argument("--json", action="store_true", help="print the ledger as JSON")
    options = parser.parse_args(arguments)
    events = read_events(options.run_dir)
    if not events:
        rule, fix = "holds no events", "give the directory of a run, such as runs/NAME"
        raise ConfigError.of("RUN_DIR", str(options.run_dir), rule, fix)
    result = ledger(events)
    text = json.dumps(result.as_dict(), indent=1) if options.json else as_table(result)
    sys.stdout.write(text + "\n")
    return EXIT_DONE


def as_table(result: Goodput) -> str:
    """Return the ledger as text for people."""
    steps = {"productive": f"{result.steps} steps", "lost work": f"{result.steps_lost} steps"}
    rows = [
        _row(name, seconds, result.wall_seconds, steps.get(name, ""))
        for name, seconds in result.parts.items()
        if seconds or name in steps
    ]
    rows.append(_row("residual", result.residual_seconds, result.wall_seconds, "no event explains it"))
    state = "finished" if result.finished else "not finished"
    head = f"wall time {result.wall_seconds:.1f} s, {state}, goodput {result.goodput:.1%}"
    return "\n".join([head, "", *rows, *_restart_rows(result.restarts)])


def _row(name: str, seconds: float, wall_seconds: float, note: str) -> str:
    share = seconds / wall_seconds if wall_seconds else 0.0
    bar = "█" * round(share * _BAR_WIDTH)
    return f"{name:<11}{seconds:>9.1f} s {share:>6.1%}  {bar:<{_BAR_WIDTH}}  {note}".rstrip()


def _restart_rows(restarts: Sequence[Restart]) -> list[str]:
    if not restarts:
        return []
    columns = "".join(f"{name:>11}" for name in PHASES)
    head = f"{'layer':<11}{'fault':<19}{'steps':<10}{'source':<9}{columns}      total"
    rows = ["", "restarts, seconds by phase from the fault to the first new step", head]
    for restart in restarts:
        restored = "?" if restart.restored_step is None else restart.restored_step
        steps, fault = f"{restart.step}->{restored}", restart.fault or "unplanned"
        phases = "".join(f"{restart.phases[name]:>11.2f}" for name in PHASES)
        what = f"{restart.layer:<11}{fault:<19}{steps:<10}{restart.source or '-':<9}"
        rows.append(f"{what}{phases}{restart.seconds:>11.2f}")
    return rows
