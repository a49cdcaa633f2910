from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from training.fault_config import Fault, FaultKind
from training.goodput import Restart
from training.rehearsal.verdict import FaultOutcome, Verdict, judge_faults, losses, same_losses

KILL = Fault(kind="sigkill", rank=0, step=4, point="backward")
RAISE = Fault(kind="exception", rank=1, step=2, point="forward")
PHASES = {"detect": 0.5, "restart": 1.0}
RESTART = Restart(
    layer="in-job",
    fault="sigkill",
    fault_index=0,
    step=3,
    restored_step=2,
    source="memory",
    began=10.0,
    resumed=11.5,
    lost_work_seconds=0.1,
    phases=PHASES,
)


def event(kind: str, time: float, **fields: Any) -> dict[str, Any]:
    return {"event": kind, "time": time, **fields}


def hit(time: float = 10.0, *, index: int = 0, pid: int = 77) -> dict[str, Any]:
    return event("fault", time, index=index, pid=pid, node="node-1", step=4)


def death(*, number: int = 9, stopped: bool = False, pid: int = 77) -> dict[str, Any]:
    return event("worker_exit", 10.1, worker_pid=pid, node="node-1", signal=number, stopped=stopped)


STEP_DONE_AGAIN = event("step", 20.0, step=4, start=19.0, rank=0)


def judge(*events: dict[str, Any], fault: Fault = KILL) -> FaultOutcome:
    return judge_faults([fault], events, [RESTART])[0]


def test_kill_counts_with_the_signal_in_the_wait_status() -> None:
    outcome = judge(hit(), death(), STEP_DONE_AGAIN)
    assert outcome.recovered
    assert outcome.evidence == "wait status of pid 77: SIGKILL"
    assert (outcome.layer, outcome.steps_lost, outcome.source) == ("in-job", 1, "memory")
    assert outcome.seconds == 1.5


def test_kill_of_another_process_is_no_evidence() -> None:
    assert not judge(hit(), death(pid=78), STEP_DONE_AGAIN).recovered
    assert not judge(hit(), {**death(), "node": "node-0"}, STEP_DONE_AGAIN).recovered


def test_kill_by_the_launcher_is_no_evidence() -> None:
    assert not judge(hit(), death(stopped=True), STEP_DONE_AGAIN).recovered


def test_fault_that_never_hit_is_not_recovered() -> None:
    outcome = judge(STEP_DONE_AGAIN)
    assert (outcome.evidence, outcome.recovered) == ("", False)


def test_fault_whose_step_is_not_done_again_is_not_recovered() -> None:
    before = event("step", 5.0, step=4, start=4.0, rank=0)
    outcome = judge(before, hit(), death())
    assert outcome.evidence
    assert not outcome.recovered


def test_exception_counts_as_it_left_the_training_function() -> None:
    raised = event("exception", 10.1, node="node-1", pid=77, type="InjectedFault", message="planned fault 0")
    done = event("step", 20.0, step=2, start=19.0, rank=0)
    assert judge(hit(), raised, done, fault=RAISE).recovered
    consequence = event(
        "exception", 10.1, node="node-1", pid=77, type="RuntimeError", message="connection lost"
    )
    assert not judge(hit(), consequence, done, fault=RAISE).evidence


def test_recovery_heals_the_faults_that_hit_until_it_ended() -> None:
    """GIVEN a second fault during the recovery from the first, and a third after it."""
    later = dataclasses.replace(RESTART, layer="launcher", began=20.0, resumed=22.0)
    events = [hit(10.0, index=0), hit(11.0, index=1), hit(20.0, index=2)]
    outcomes = judge_faults([KILL, KILL, KILL], events, [RESTART, later])
    assert [outcome.layer for outcome in outcomes] == ["in-job", "in-job", "launcher"]


def test_fault_that_training_sits_through_has_no_recovery() -> None:
    slow = Fault(kind="slow", rank=0, step=4)
    over = event("fault_over", 10.5, index=0, seconds=1.0)
    outcome = judge(hit(), over, STEP_DONE_AGAIN, fault=slow)
    assert outcome.recovered
    assert (outcome.layer, outcome.phases) == ("", {})


def test_fault_in_the_last_step_is_over_with_the_run() -> None:
    assert judge(hit(), death(), event("done", 20.0, step=4)).recovered


EVIDENCE: list[tuple[FaultKind, dict[str, Any], str]] = [
    ("hang", event("reentry", 11.0, node="node-1", pid=77), "pid 77 was interrupted by the in-process layer"),
    ("hang", death(number=15), "wait status of pid 77: SIGTERM"),
    ("sigstop", death(), "wait status of pid 77: SIGKILL"),
    (
        "hang",
        event("launcher_exit", 15.0, node="node-1", exit_code=75, signal=None),
        "pid 77 stood still for 5.0 s and ended with its launcher",
    ),
    (
        "launcher_kill",
        event("launcher_exit", 11.0, node="node-1", signal=9),
        "wait status of launcher of node-1: SIGKILL",
    ),
    (
        "node_loss",
        event("process_exit", 11.0, name="node-1", signal=9, exit_code=None),
        "wait status of process 1 of node-1: SIGKILL",
    ),
    (
        "control_loss",
        event("process_exit", 11.0, name="control", signal=9, exit_code=None),
        "wait status of control: SIGKILL",
    ),
    (
        "sigterm",
        event("process_exit", 11.0, name="node-1", signal=None, exit_code=143),
        "exit code of process 1 of node-1: 143",
    ),
    ("slow", event("fault_over", 11.0, index=0, seconds=1.0), "pid 77 stood still for 1.0 s"),
    ("nan", event("non_finite", 11.0, step=4), "step 4 had a loss that is not finite"),
    (
        "corrupt_snapshot",
        event("refused", 11.0, tier="memory", step=3, source="memory step 3", reason="differs"),
        "memory step 3 was refused: differs",
    ),
    (
        "corrupt_checkpoint",
        event("refused", 11.0, tier="durable", step=2, source="/run/step-2", reason="differs"),
        "/run/step-2 was refused: differs",
    ),
    (
        "full_disk",
        event("checkpoint", 11.0, step=4, status="failed", reason="ENOSPC"),
        "save of step 4 failed",
    ),
]


@pytest.mark.parametrize(("kind", "proof", "evidence"), EVIDENCE)
def test_evidence_of_each_kind(kind: FaultKind, proof: dict[str, Any], evidence: str) -> None:
    fault = dataclasses.replace(KILL, kind=kind)
    struck = {**hit(), "damaged_step": 3, "damaged_path": "/run/step-2"}
    assert judge(struck, proof, fault=fault).evidence.startswith(evidence)
    assert not judge(struck, {**proof, "time": 9.0}, fault=fault).evidence


def test_a_victim_that_does_a_further_step_was_not_stopped() -> None:
    hang = dataclasses.replace(KILL, kind="hang")
    ended = event("launcher_exit", 15.0, node="node-1", exit_code=75, signal=None)
    stepped = event("step", 11.0, node="node-1", pid=77, step=5, start=10.5)
    assert judge(hit(), ended, fault=hang).evidence
    assert not judge(hit(), stepped, ended, fault=hang).evidence
    assert not judge(hit(), {**ended, "exit_code": 0}, fault=hang).evidence
    # AND what comes after its end proves nothing
    assert not judge(hit(), death(stopped=True), ended, fault=hang).evidence


def test_a_stopped_victim_may_go_on_when_it_is_woken_to_be_ended() -> None:
    stopped = dataclasses.replace(KILL, kind="sigstop")
    stepped = event("step", 10.05, node="node-1", pid=77, step=5, start=10.0)
    assert judge(hit(), stepped, death(), fault=stopped).evidence


def test_last_loss_of_a_step_counts() -> None:
    events = [event("metrics", t, rank=0, step=1, loss=loss) for t, loss in ((1.0, 3.0), (2.0, 4.0))]
    assert losses(events) == {(0, 1): 4.0}


def test_losses_are_compared_bit_for_bit_on_every_rank_and_step() -> None:
    ours = {(0, 1): 1.0, (1, 1): 1.0}
    assert same_losses(ours, dict(ours), world_size=2, steps=1)
    assert not same_losses(ours, {**ours, (1, 1): 1.0000000000000002}, world_size=2, steps=1)
    assert not same_losses({(0, 1): 1.0}, {(0, 1): 1.0}, world_size=2, steps=1)
    assert not same_losses(ours, dict(ours), world_size=2, steps=2)


def verdict(**changes: Any) -> Verdict:
    fields: dict[str, Any] = {
        "faults": (judge(hit(), death(), STEP_DONE_AGAIN),),
        "finished": True,
        "steps": 60,
        "identical_loss": True,
        "identical_params": True,
        "goodput_percent": 58.66,
    }
    return Verdict(**{**fields, **changes})


def test_last_line() -> None:
    expected = "VERDICT recovered=1/1 steps_lost=1 identical_loss=yes identical_params=yes goodput=58.7%"
    assert verdict().line() == expected


def test_passes_only_without_a_trace() -> None:
    assert verdict().passed
    assert not verdict(identical_loss=False).passed
    assert not verdict(identical_params=False).passed
    assert not verdict(finished=False).passed
    assert not verdict(faults=(judge(hit(), STEP_DONE_AGAIN),)).passed
