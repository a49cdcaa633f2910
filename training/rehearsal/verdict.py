"""Judge a disturbed run against the same run undisturbed, from their events alone.

A fault counts only with evidence that it hit: the signal in the wait status of the process that was to
die, or the exception as it left the training function.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training.config import Fault

Event = Mapping[str, Any]


@dataclass(frozen=True, kw_only=True, slots=True)
class FaultOutcome:
    """What became of one planned fault."""

    index: int
    kind: str
    rank: int
    step: int
    point: str
    evidence: str
    """Proof that the fault hit; empty if there is none."""
    recovered: bool
    """The step that it hit was done after it."""
    layer: str
    """in-process or in-job: who brought the ranks back."""
    steps_lost: int
    """Finished steps that had to be done again."""
    phases: dict[str, float]
    """Seconds from the fault to the next step, by phase, in order."""

    @property
    def seconds(self) -> float:
        return sum(self.phases.values())


@dataclass(frozen=True, kw_only=True, slots=True)
class Verdict:
    """Whether the run survived its faults without a trace."""

    faults: tuple[FaultOutcome, ...]
    finished: bool
    """Both runs ended by themselves."""
    steps: int
    identical_loss: bool
    identical_params: bool
    goodput_percent: float

    @property
    def recovered(self) -> int:
        return sum(fault.recovered for fault in self.faults)

    @property
    def steps_lost(self) -> int:
        return sum(fault.steps_lost for fault in self.faults)

    @property
    def passed(self) -> bool:
        all_recovered = self.recovered == len(self.faults)
        return self.finished and all_recovered and self.identical_loss and self.identical_params

    def line(self) -> str:
        return (
            f"VERDICT recovered={self.recovered}/{len(self.faults)} steps_lost={self.steps_lost} "
            f"identical_loss={_yes(self.identical_loss)} identical_params={_yes(self.identical_params)} "
            f"goodput={self.goodput_percent:.1f}%"
        )

    def as_dict(self) -> dict[str, Any]:
        return {
            **asdict(self),
            "passed": self.passed,
            "recovered": self.recovered,
            "steps_lost": self.steps_lost,
            "verdict": self.line(),
        }


def judge_faults(faults: Sequence[Fault], events: Sequence[Event]) -> tuple[FaultOutcome, ...]:
    """Return what became of each planned fault of a run."""
    return tuple(_judge(index, fault, events) for index, fault in enumerate(faults))


def losses(events: Iterable[Event]) -> dict[tuple[int, int], float]:
    """Return the loss of each (rank, step); of a step that was done again, the last one."""
    steps = (event for event in events if event["event"] == "step")
    return {(int(event["rank"]), int(event["step"])): float(event["loss"]) for event in steps}


def same_losses(
    ours: Mapping[tuple[int, int], float],
    theirs: Mapping[tuple[int, int], float],
    *,
    world_size: int,
    steps: int,
) -> bool:
    """Say whether every rank has the same loss, bit for bit, at every step of both runs."""
    wanted = [(rank, step) for rank in range(world_size) for step in range(1, steps + 1)]
    return all(key in ours and key in theirs and ours[key] == theirs[key] for key in wanted)


def _judge(index: int, fault: Fault, events: Sequence[Event]) -> FaultOutcome:
    hit = next((event for event in events if _is_hit(event, index)), None)
    evidence = _evidence(fault, hit, events) if hit else ""
    after = [event for event in events if hit and event["time"] >= hit["time"]]
    redone = [event for event in after if event["event"] == "step" and event["step"] >= fault.step]
    return FaultOutcome(
        index=index,
        kind=fault.kind,
        rank=fault.rank,
        step=fault.step,
        point=fault.point,
        evidence=evidence,
        recovered=bool(evidence and redone),
        layer=_layer(after),
        steps_lost=_steps_lost(fault, after) if hit else 0,
        phases=_phases(float(hit["time"]), after) if hit else {},
    )


def _is_hit(event: Event, index: int) -> bool:
    return bool(event["event"] == "fault" and event["index"] == index)


def _evidence(fault: Fault, hit: Event, events: Sequence[Event]) -> str:
    if fault.kind == "sigkill":
        for event in events:
            died = event["event"] == "worker_exit" and event["worker_pid"] == hit["pid"]
            if died and event["signal"] == signal.SIGKILL and not event["stopped"]:
                return f"wait status of pid {hit['pid']}: SIGKILL"
        return ""
    for event in events:
        raised = event["event"] == "exception" and event["pid"] == hit["pid"]
        if raised and event["type"] == "InjectedFault" and event["time"] >= hit["time"]:
            return f"exception in pid {hit['pid']}: {event['message']}"
    return ""


def _layer(after: Sequence[Event]) -> str:
    for event in after:
        if event["event"] == "reentry":
            return "in-process"
        if event["event"] == "round":
            return "in-job"
    return ""


def _steps_lost(fault: Fault, after: Sequence[Event]) -> int:
    finished = fault.step if fault.point == "after_optimizer" else fault.step - 1
    restored = next((event["step"] for event in after if event["event"] == "restored"), 0)
    return max(0, finished - int(restored))


def _phases(start: float, after: Sequence[Event]) -> dict[str, float]:
    """Return the seconds of each phase of a recovery; a phase ends when the last rank has ended it."""
    ends = _phase_ends(after)
    phases, reached = {}, start
    for name, end in ends.items():
        phases[name] = max(0.0, end - reached)
        reached = max(reached, end)
    return phases


def _phase_ends(after: Sequence[Event]) -> dict[str, float]:
    first_step = next((event["start"] for event in after if _is_first_step(event, after)), None)
    if first_step is None:
        return {}
    incident = [event for event in after if event["time"] <= first_step]
    ends = {
        "stop": _last(incident, "worker_exit"),
        "respawn": _last(incident, "round"),
        "imports": _last(incident, "enter"),
        "reentry": _last(incident, "reentry"),
        "rendezvous": _last(incident, "span", name="rendezvous"),
        "build": _last(incident, "span", name="build"),
        "load": _last(incident, "span", name="load"),
        "first step begins": first_step,
    }
    return {name: end for name, end in ends.items() if end is not None}


def _is_first_step(event: Event, after: Sequence[Event]) -> bool:
    """Say whether a step was begun after the state was restored (or made anew) following the fault."""
    loaded = _first(after, "span", name="load")
    return event["event"] == "step" and loaded is not None and event["start"] >= loaded


def _first(events: Sequence[Event], kind: str, **fields: Any) -> float | None:
    return next((float(event["time"]) for event in events if _matches(event, kind, fields)), None)


def _last(events: Sequence[Event], kind: str, **fields: Any) -> float | None:
    return _first(list(reversed(events)), kind, **fields)


def _matches(event: Event, kind: str, fields: Mapping[str, Any]) -> bool:
    return event["event"] == kind and all(event.get(name) == value for name, value in fields.items())


def _yes(value: bool) -> str:
    return "yes" if value else "no"
