"""Every kind of fault, at rank 0 and at another, at every point: nothing may be lost or changed.

Several faults to a run. Each run must equal the undisturbed one bit for bit, in the losses of every rank
and step, and in the final state; a fault that leaves no proof of its effect fails it.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.faults.clean_machine import CleanMachine
from tests.faults.rehearsals import explain, rehearse
from training.events import read_events
from training.fault_config import Fault, FaultKind, FaultPoint

pytestmark = pytest.mark.timeout(600)


def fault(kind: FaultKind, rank: int, step: int, point: FaultPoint = "backward", **fields: Any) -> Fault:
    return Fault(kind=kind, rank=rank, step=step, point=point, **fields)


IN_PROCESS = (
    fault("exception", 0, 4, "forward"),
    fault("exception", 1, 9, "backward"),
    fault("exception", 0, 14, "before_optimizer"),
    fault("exception", 0, 20, "after_optimizer"),
    fault("exception", 1, 26, "save"),
    fault("slow", 0, 33, "backward", seconds=1.0),
    fault("exception", 0, 38, "backward"),
    fault("exception", 0, 38, "restore"),
)
KILLS = (
    fault("sigkill", 1, 0, "setup"),
    fault("sigkill", 0, 8, "forward"),
    fault("sigkill", 1, 15, "before_optimizer"),
    fault("sigkill", 0, 22, "after_optimizer"),
    fault("sigkill", 1, 28, "save"),
    fault("sigkill", 0, 36, "backward"),
    fault("sigkill", 0, 36, "restore"),
    fault("sigkill", 1, 42, "backward"),
    fault("sigkill", 0, 42, "rendezvous"),
)
NODES = (
    fault("launcher_kill", 0, 8),
    fault("launcher_kill", 1, 16, "forward"),
    fault("node_loss", 0, 24),
    fault("sigterm", 1, 32, "before_optimizer"),
    fault("node_loss", 1, 40, "after_optimizer"),
    fault("sigterm", 0, 45),
)
HANGS = (
    fault("hang", 0, 8),
    fault("sigstop", 0, 16, "forward"),
    fault("hang", 1, 26, "before_optimizer"),
    fault("sigstop", 1, 36, "after_optimizer"),
)
STATE = (
    fault("full_disk", 0, 7),
    fault("nan", 0, 11, "forward"),
    fault("corrupt_snapshot", 0, 17),
    fault("full_disk", 1, 20),
    fault("corrupt_checkpoint", 0, 28, "forward"),
    fault("corrupt_snapshot", 1, 35),
    fault("nan", 1, 40, "forward"),
    fault("corrupt_checkpoint", 1, 45),
)
CONTROL = (
    fault("control_loss", 0, 10),
    fault("control_loss", 1, 30),
    fault("sigkill", 0, 31),
)
RUNS = {
    "in-process": IN_PROCESS,
    "kills": KILLS,
    "nodes": NODES,
    "hangs": HANGS,
    "state": STATE,
    "control": CONTROL,
}


@pytest.mark.parametrize("name", RUNS)
def test_faults_leave_no_trace(
    name: str, machine: CleanMachine, tmp_path: Path, data: Path, undisturbed: Path
) -> None:
    verdict = rehearse(RUNS[name], machine=machine, tmp_path=tmp_path, data=data, undisturbed=undisturbed)
    assert verdict["passed"], explain(verdict)


def test_lost_node_loses_its_memory(
    machine: CleanMachine, tmp_path: Path, data: Path, undisturbed: Path
) -> None:
    """GIVEN a kill and a lost node THEN state comes from memory after one, from a disk after the other."""
    plan = (fault("sigkill", 1, 20), fault("node_loss", 1, 28))
    verdict = rehearse(plan, machine=machine, tmp_path=tmp_path, data=data, undisturbed=undisturbed)
    assert verdict["passed"], explain(verdict)
    kill, loss = verdict["faults"]
    assert (kill["source"], kill["steps_lost"]) == ("memory", 0)
    events = read_events(Path(verdict["run_dir"]) / "disturbed")
    restored = max(event["time"] for event in events if event["event"] == "restored")
    # that of step 24 may still be written when the node dies
    committed = [e["step"] for e in events if e.get("status") == "committed" and e["time"] < restored]
    assert (loss["source"], loss["steps_lost"]) == ("durable", 27 - max(committed))


@pytest.mark.parametrize("overlap", ["defer", "wait"])
def test_training_goes_on_without_the_control_store(
    overlap: str, machine: CleanMachine, tmp_path: Path, data: Path, undisturbed: Path
) -> None:
    verdict = rehearse(
        (fault("control_loss", 0, 10),),
        machine=machine,
        tmp_path=tmp_path,
        data=data,
        undisturbed=undisturbed,
        overlap=overlap,
    )
    assert verdict["passed"], explain(verdict)
    events = read_events(Path(verdict["run_dir"]) / "disturbed")
    lost, back = (
        next(event["time"] for event in events if event["event"] == name)
        for name in ("fault", "process_exit")
    )
    done = {event["step"] for event in events if event["event"] == "step" and lost < event["start"] < back}
    assert len(done) > 1
    assert [e for e in events if e["event"] in ("exception", "worker_exit") and lost < e["time"] < back] == []


def test_spare_takes_no_survivors_place_at_a_new_store(
    machine: CleanMachine, tmp_path: Path, data: Path, undisturbed: Path
) -> None:
    """GIVEN a rank that is killed while the store is lost, and a spare THEN no node loses its memory."""
    plan = (fault("control_loss", 0, 20), fault("sigkill", 1, 22))
    verdict = rehearse(plan, machine=machine, tmp_path=tmp_path, data=data, undisturbed=undisturbed, spares=1)
    assert verdict["passed"], explain(verdict)
    assert [found["source"] for found in verdict["faults"]] == ["memory", "memory"]


@pytest.mark.parametrize("rank", [0, 1])
def test_spare_takes_a_lost_nodes_place(
    rank: int, machine: CleanMachine, tmp_path: Path, data: Path, undisturbed: Path
) -> None:
    plan = (fault("node_loss", rank, 20),)
    verdict = rehearse(plan, machine=machine, tmp_path=tmp_path, data=data, undisturbed=undisturbed, spares=1)
    assert verdict["passed"], explain(verdict)
    steps = [
        event for event in read_events(Path(verdict["run_dir"]) / "disturbed") if event["event"] == "step"
    ]
    before, after = ({e["node"] for e in steps if e["step"] == step} for step in (10, 48))
    assert len(before) == len(after) == 2
    assert len(before & after) == 1


@pytest.mark.parametrize("layers", ["in_process", "in_job"])
def test_each_layer_alone(
    layers: str, machine: CleanMachine, tmp_path: Path, data: Path, undisturbed: Path
) -> None:
    kinds: dict[str, tuple[FaultKind, FaultKind]] = {
        "in_process": ("exception", "exception"),
        "in_job": ("exception", "sigkill"),
    }
    first, second = kinds[layers]
    plan = (fault(first, 0, 10), fault(second, 1, 20))
    verdict = rehearse(
        plan, machine=machine, tmp_path=tmp_path, data=data, undisturbed=undisturbed, layers=layers
    )
    assert verdict["passed"], explain(verdict)


def test_kinds_victims_and_points_are_covered() -> None:
    planned = [found for run in RUNS.values() for found in run]
    assert len(planned) >= 25
    assert {found.kind for found in planned} == set(FaultKind.__args__)  # type: ignore[attr-defined]
    assert {found.kind for found in planned if found.rank == 0} == {found.kind for found in planned}
