from __future__ import annotations

import signal
import subprocess
import sys
from pathlib import Path

import pytest

from training import environment
from training.events import EventLog, read_events
from training.fault_config import Fault
from training.faults import FaultPlan, InjectedFault

FAULT = Fault(kind="exception", rank=1, step=3, point="backward")


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.REHEARSAL, "1")


def plan(run_dir: Path) -> tuple[FaultPlan, EventLog]:
    events = EventLog(run_dir, role="rank", node="node-0", rank=1)
    return FaultPlan([FAULT], directory=run_dir / "faults", events=events), events


@pytest.mark.usefixtures("armed")
def test_fault_hits_at_its_place_only(tmp_path: Path) -> None:
    faults, events = plan(tmp_path)
    with events:
        faults.at(step=2, rank=1, point="backward")
        faults.at(step=3, rank=0, point="backward")
        faults.at(step=3, rank=1, point="forward")
        with pytest.raises(InjectedFault, match="planned fault 0: rank 1, step 3, backward"):
            faults.at(step=3, rank=1, point="backward")
    kinds = [(event["event"], event["kind"], event["step"]) for event in read_events(tmp_path)]
    assert kinds == [("fault", "exception", 3)]


@pytest.mark.usefixtures("armed")
def test_fault_hits_once_over_all_processes(tmp_path: Path) -> None:
    first, events = plan(tmp_path)
    again, more = plan(tmp_path)
    with events, more:
        with pytest.raises(InjectedFault):
            first.at(step=3, rank=1, point="backward")
        again.at(step=3, rank=1, point="backward")


def test_recipe_faults_are_dead_outside_of_a_rehearsal(tmp_path: Path) -> None:
    faults, events = plan(tmp_path)
    with events:
        faults.at(step=3, rank=1, point="backward")
    assert read_events(tmp_path) == []


KILLED = """
import sys
from pathlib import Path
from training.fault_config import Fault
from training.events import EventLog
from training.faults import FaultPlan
run_dir = Path(sys.argv[1])
events = EventLog(run_dir, role="rank", node="node-0", rank=0)
fault = Fault(kind="sigkill", rank=0, step=1, point="forward")
FaultPlan([fault], directory=run_dir / "faults", events=events).at(step=1, rank=0, point="forward")
"""


@pytest.mark.usefixtures("armed")
def test_sigkill_leaves_its_event_first(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, timeout=60, check=False)
    assert process.returncode == -signal.SIGKILL
    assert [event["kind"] for event in read_events(tmp_path)] == ["sigkill"]
