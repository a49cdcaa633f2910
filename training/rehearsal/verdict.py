"""Judge a disturbed run against the same run undisturbed, from their events alone.

A fault counts only with evidence that it hit: the signal in the wait status of the process that was to
die, or the exception as it left the training function.
"""

from __future__ import annotations

import signal
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from training.errors import EXIT_STOPPED
from training.fault_config import Fault
from training.goodput import Restart

# Signals that a rank ends with: its own, or that of the layer which finds it hanging.
DEADLY = {
    "sigkill": (signal.SIGKILL,),
    "sigstop": (signal.SIGKILL, signal.SIGTERM),
    "hang": (signal.SIGKILL, signal.SIGTERM),
}

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
    phases: dict[str, float]
    """Seconds from the last progress to the state being loaded, by phase, in order."""

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
    following = {restart.fault_index: restart for restart in restarts}
    hit_of = {event["index"]: event for event in events if event["event"] == "fault"}
    return tuple(
        _judge(index, fault, hit_of.get(index), following.get(index), events)
        for index, fault in enumerate(faults)
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
    index: int, fault: Fault, hit: Event | None, restart: Restart | None, events: Sequence[Event]
) -> FaultOutcome:
    evidence = _evidence(fault, hit, events) if hit else ""
    return FaultOutcome(
        index=index,
        kind=fault.kind,
        rank=fault.rank,
        step=fault.step,
        point=fault.point,
        evidence=evidence,
        recovered=bool(evidence and hit and _was_redone(fault, hit, events)),
        layer=restart.layer if restart else "",
        steps_lost=restart.steps_lost if restart else 0,
        phases=dict(restart.phases) if restart else {},
    )


def _was_redone(fault: Fault, hit: Event, events: Sequence[Event]) -> bool:
    """Say whether training reached the step of the fault (or, if that was not lost, the next) after it."""
    return any(
        event["event"] == "step" and event["step"] >= fault.step and event["start"] > hit["time"]
        for event in events
    )


def _evidence(fault: Fault, hit: Event, events: Sequence[Event]) -> str:
    after = [event for event in events if event["time"] >= hit["time"]]
    return next((proof for event in after if (proof := _proof(fault.kind, hit, event))), "")


def _proof(kind: str, hit: Event, event: Event) -> str:
    """Return what an event proves about a fault; empty if nothing."""
    name, pid = event["event"], hit["pid"]
    if name == "exception" and kind == "exception" and event["pid"] == pid:
        return f"exception in pid {pid}: {event['message']}" if event["type"] == "InjectedFault" else ""
    if name == "reentry" and kind == "hang" and event["pid"] == pid:
        return f"pid {pid} was interrupted by the in-process layer"
    if name == "worker_exit" and kind in DEADLY and event["worker_pid"] == pid and not event["stopped"]:
        return _signal_proof(f"pid {pid}", event, DEADLY[kind])
    if name == "launcher_exit" and kind == "launcher_kill" and event["node"] == hit["node"]:
        return _signal_proof(f"launcher of {hit['node']}", event, (signal.SIGKILL,))
    if name != "process_exit":
        return ""
    if kind == "control_loss" and event["name"] == "control":
        return _signal_proof("control", event, (signal.SIGKILL,))
    if kind == "node_loss" and event["name"] == hit["node"]:
        return _signal_proof(f"process 1 of {hit['node']}", event, (signal.SIGKILL,))
    if kind == "sigterm" and event["name"] == hit["node"] and event["exit_code"] == EXIT_STOPPED:
        return f"exit code of process 1 of {hit['node']}: {EXIT_STOPPED}"
    return ""


def _signal_proof(who: str, event: Event, signals: Sequence[signal.Signals]) -> str:
    if event["signal"] not in signals:
        return ""
    return f"wait status of {who}: {signal.Signals(event['signal']).name}"


def _yes(value: bool) -> str:
    return "yes" if value else "no"
