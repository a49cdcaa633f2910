"""Proof that a planned fault hit: the event that only its effect leaves (training/fault_config.py)."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from typing import Any

from training.errors import EXIT_DONE, EXIT_STOPPED
from training.fault_config import Fault, FaultKind

Event = Mapping[str, Any]
Proof = Callable[[Event, Event], str]
"""(`fault` event, later event) to what the later one proves; empty if nothing."""

# A rank that hangs is ended by the layer that finds it.
_BY_A_LAYER = (signal.SIGKILL, signal.SIGTERM)
_KILLED = (signal.SIGKILL,)
# Nothing that comes after the end of the victim proves anything of it.
_STANDS_STILL: tuple[FaultKind, ...] = ("hang", "sigstop")


def find_evidence(fault: Fault, hit: Event, events: Sequence[Event]) -> str:
    """Return the first proof that a fault hit; empty if there is none.

    Args:
        fault: As it was planned.
        hit: Its `fault` event, which says what is about to be done.
        events: All events of the run.
    """
    proofs = _PROOFS[fault.kind]
    after = [event for event in events if event["time"] >= hit["time"]]
    if fault.kind in _STANDS_STILL:
        after = list(_while_it_stands_still(fault, hit, after))
    return next((found for event in after for proof in proofs if (found := proof(hit, event))), "")


def _while_it_stands_still(fault: Fault, hit: Event, events: Iterable[Event]) -> Iterator[Event]:
    for event in events:
        if fault.kind == "hang" and event["event"] == "step" and _same_process(hit, event):
            return  # it was not hit; a stopped one may go on when the layer that ends it wakes it
        yield event
        if event["event"] == "worker_exit" and _is_victim(hit, event):
            return


def _exception(hit: Event, event: Event) -> str:
    raised = event["event"] == "exception" and event["type"] == "InjectedFault" and _same_process(hit, event)
    return f"exception in pid {event['pid']}: {event['message']}" if raised else ""


def _interrupted(hit: Event, event: Event) -> str:
    again = event["event"] == "reentry" and _same_process(hit, event)
    return f"pid {hit['pid']} was interrupted by the in-process layer" if again else ""


def _death(*signals: signal.Signals) -> Proof:
    def proof(hit: Event, event: Event) -> str:
        ended = event["event"] == "worker_exit" and not event["stopped"]
        if not ended or not _is_victim(hit, event):
            return ""
        return _signal_proof(f"pid {hit['pid']}", event, signals)

    return proof


def _swept(hit: Event, event: Event) -> str:
    """Return how a victim ended whose launcher was replaced, for another fault, before it was found."""
    ended = event["event"] == "launcher_exit" and event["node"] == hit["node"]
    if not ended or (event["exit_code"] == EXIT_DONE and not event["signal"]):
        return ""
    return f"pid {hit['pid']} stood still for {event['time'] - hit['time']:.1f} s and ended with its launcher"


def _launcher_death(hit: Event, event: Event) -> str:
    if event["event"] != "launcher_exit" or event["node"] != hit["node"]:
        return ""
    return _signal_proof(f"launcher of {hit['node']}", event, _KILLED)


def _node_death(hit: Event, event: Event) -> str:
    if event["event"] != "process_exit" or event["name"] != hit["node"]:
        return ""
    return _signal_proof(f"process 1 of {hit['node']}", event, _KILLED)


def _control_death(hit: Event, event: Event) -> str:
    if event["event"] != "process_exit" or event["name"] != "control":
        return ""
    return _signal_proof("control", event, _KILLED)


def _eviction(hit: Event, event: Event) -> str:
    ended = event["event"] == "process_exit" and event["name"] == hit["node"]
    if not ended or event["exit_code"] != EXIT_STOPPED:
        return ""
    return f"exit code of process 1 of {hit['node']}: {EXIT_STOPPED}"


def _slept(hit: Event, event: Event) -> str:
    over = event["event"] == "fault_over" and event["index"] == hit["index"]
    return f"pid {hit['pid']} stood still for {event['seconds']:.1f} s" if over else ""


def _not_finite(hit: Event, event: Event) -> str:
    found = event["event"] == "non_finite" and event["step"] == hit["step"]
    return f"step {event['step']} had a loss that is not finite" if found else ""


def _refused_snapshot(hit: Event, event: Event) -> str:
    found = event["event"] == "refused" and event["tier"] == "memory"
    return _refusal(event) if found and event.get("step") == hit["damaged_step"] else ""


def _refused_checkpoint(hit: Event, event: Event) -> str:
    found = event["event"] == "refused" and event["tier"] == "durable"
    return _refusal(event) if found and hit["damaged_path"] in event["source"] else ""


def _failed_save(hit: Event, event: Event) -> str:
    failed = event["event"] == "checkpoint" and event["status"] == "failed"
    return f"save of step {event['step']} failed: {event.get('reason', 'see the log')}" if failed else ""


_PROOFS: dict[FaultKind, tuple[Proof, ...]] = {
    "exception": (_exception,),
    "hang": (_interrupted, _death(*_BY_A_LAYER), _swept),
    "sigkill": (_death(*_KILLED),),
    "sigstop": (_death(*_BY_A_LAYER), _swept),
    "slow": (_slept,),
    "nan": (_not_finite,),
    "corrupt_snapshot": (_refused_snapshot,),
    "corrupt_checkpoint": (_refused_checkpoint,),
    "full_disk": (_failed_save,),
    "launcher_kill": (_launcher_death,),
    "node_loss": (_node_death,),
    "control_loss": (_control_death,),
    "sigterm": (_eviction,),
}


def _same_process(hit: Event, event: Event) -> bool:
    return bool((event["node"], event["pid"]) == (hit["node"], hit["pid"]))


def _is_victim(hit: Event, event: Event) -> bool:
    return bool((event["node"], event["worker_pid"]) == (hit["node"], hit["pid"]))


def _refusal(event: Event) -> str:
    return f"{event['source']} was refused: {event['reason']}"


def _signal_proof(who: str, event: Event, signals: Sequence[signal.Signals]) -> str:
    if event["signal"] not in signals:
        return ""
    return f"wait status of {who}: {signal.Signals(event['signal']).name}"
