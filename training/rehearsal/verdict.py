"""Judge a disturbed run against the same run undisturbed, from their events alone.

A fault counts only with evidence that it hit: the signal in the wait status of the process that was to
die, or the exception as it left the training function.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training.fault_config import Fault
from training.goodput import Restart
from training.rehearsal.evidence import find_evidence

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
    """Who brought the ranks back: in-process, in-job or launcher."""
    steps_lost: int
    """Finished steps that had to be done again."""
    source: str
    """Tier that the state came from; empty where none was loaded."""
    phases: dict[str, float]
    """Seconds from the fault to the end of the first new step, by phase, in order."""

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


def judge_faults(
    faults: Sequence[Fault], events: Sequence[Event], restarts: Sequence[Restart]
) -> tuple[FaultOutcome, ...]:
    """Return what became of each planned fault of a run.

    Args:
        faults: The plan.
        events: All events of the run.
        restarts: Its restarts, as the goodput ledger has found them.
    """
    hit_of = {event["index"]: event for event in events if event["event"] == "fault"}
    return tuple(
        _judge(index, fault, hit_of.get(index), restarts, events) for index, fault in enumerate(faults)
    )


def losses(events: Iterable[Event]) -> dict[tuple[int, int], float]:
    """Return the loss of each (rank, step); of a step that was done again, the last one."""
    found = (event for event in events if event["event"] == "metrics")
    return {(int(event["rank"]), int(event["step"])): float(event["loss"]) for event in found}


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


def _judge(
    index: int, fault: Fault, hit: Event | None, restarts: Sequence[Restart], events: Sequence[Event]
) -> FaultOutcome:
    evidence = find_evidence(fault, hit, events) if hit else ""
    restart = _restart_after(hit, restarts) if hit and fault.restarts else None
    return FaultOutcome(
        index=index,
        kind=fault.kind,
        rank=fault.rank,
        step=fault.step,
        point=fault.point,
        evidence=evidence,
        recovered=bool(evidence and hit and _went_on(fault, hit, events)),
        layer=restart.layer if restart else "",
        steps_lost=restart.steps_lost if restart else 0,
        source=restart.source if restart else "",
        phases=dict(restart.phases) if restart else {},
    )


def _restart_after(hit: Event, restarts: Sequence[Restart]) -> Restart | None:
    """Return the recovery from a fault: a fault during a recovery is healed by the same one."""
    return next((restart for restart in restarts if restart.resumed > hit["time"]), None)


def _went_on(fault: Fault, hit: Event, events: Sequence[Event]) -> bool:
    """Say whether training reached the step of the fault (or, if that was not lost, the next) after it."""
    return any(
        (event["event"] == "step" and event["step"] >= fault.step and event["start"] > hit["time"])
        or (event["event"] == "done" and event["time"] > hit["time"])
        for event in events
    )


def _yes(value: bool) -> str:
    return "yes" if value else "no"
