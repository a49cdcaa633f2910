from __future__ import annotations

import contextlib
import math
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.tiny import tiny_recipe
from training import environment
from training.events import EventLog, read_events
from training.faults import FaultPlan, InjectedFault

Plan = Callable[..., FaultPlan]
RAISE = {"kind": "exception", "rank": 1, "step": 3, "point": "backward"}


@pytest.fixture
def armed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.REHEARSAL, "1")


def make_plan(run_dir: Path, *faults: dict[str, Any], rank: int = 1) -> tuple[FaultPlan, EventLog]:
    recovery = {"layers": "both", "group_timeout_seconds": 20.0}
    training = {"steps": 12, "device": "cpu", "non_finite_loss": "roll_back"}
    rehearsal = {"faults": list(faults or [RAISE])}
    config = tiny_recipe(Path("data"), ranks=2, training=training, recovery=recovery, rehearsal=rehearsal)
    events = EventLog(run_dir, role="rank", node="node-0", rank=rank)
    return FaultPlan(config, run_dir=run_dir, rank=rank, node="node-0", events=events), events


@pytest.fixture
def plan(tmp_path: Path) -> Iterator[Callable[..., FaultPlan]]:
    with contextlib.ExitStack() as logs:

        def make(*faults: dict[str, Any], rank: int = 1) -> FaultPlan:
            made, events = make_plan(tmp_path, *faults, rank=rank)
            logs.enter_context(events)
            return made

        yield make


def seen(run_dir: Path) -> list[tuple[Any, ...]]:
    return [(event["event"], event["kind"], event["step"], event["point"]) for event in read_events(run_dir)]


@pytest.mark.usefixtures("armed")
def test_fault_hits_at_its_place_only(tmp_path: Path, plan: Plan) -> None:
    faults = plan()
    faults.in_step("backward", step=2)
    plan(rank=0).in_step("backward", step=3)
    faults.in_step("after_optimizer", step=3)
    with pytest.raises(InjectedFault, match="planned fault 0: rank 1, step 3, backward"):
        faults.in_step("backward", step=3)
    assert seen(tmp_path) == [("fault", "exception", 3, "backward")]


@pytest.mark.usefixtures("armed")
def test_fault_hits_once_over_all_processes(tmp_path: Path, plan: Plan) -> None:
    with pytest.raises(InjectedFault):
        plan().in_step("backward", step=3)
    plan().in_step("backward", step=3)
    assert len(seen(tmp_path)) == 1


def test_recipe_faults_are_dead_outside_of_a_rehearsal(tmp_path: Path, plan: Plan) -> None:
    plan().in_step("backward", step=3)
    assert read_events(tmp_path) == []


@pytest.mark.usefixtures("armed")
@pytest.mark.parametrize("point", ["setup", "rendezvous", "restore"])
def test_setup_fault_waits_for_what_leads_to_its_setup(tmp_path: Path, plan: Plan, point: Any) -> None:
    faults = plan(RAISE, {**RAISE, "point": point})
    # GIVEN a set-up before the fault of step 3
    faults.in_setup(point)
    assert seen(tmp_path) == []
    # WHEN that fault has hit
    with pytest.raises(InjectedFault):
        faults.in_step("backward", step=3)
    # THEN the next set-up is hit, and no other
    with pytest.raises(InjectedFault, match=f"planned fault 1: rank 1, step 3, {point}"):
        faults.in_setup(point)
    faults.in_setup(point)


@pytest.mark.usefixtures("armed")
def test_setup_fault_of_step_0_hits_the_first_setup(plan: Plan) -> None:
    with pytest.raises(InjectedFault):
        plan({**RAISE, "point": "setup", "step": 0}).in_setup("setup")


@pytest.mark.usefixtures("armed")
def test_fault_during_a_save_hits_the_first_one_from_its_step_on(tmp_path: Path, plan: Plan) -> None:
    faults = plan({**RAISE, "point": "save"})
    faults.in_step("save", step=2)
    with pytest.raises(InjectedFault):
        faults.in_step("save", step=4)
    faults.in_step("save", step=6)
    assert seen(tmp_path) == [("fault", "exception", 4, "save")]


@pytest.mark.usefixtures("armed")
def test_slow_rank_goes_on_and_says_how_long_it_slept(tmp_path: Path, plan: Plan) -> None:
    plan({**RAISE, "kind": "slow", "seconds": 0.1}).in_step("backward", step=3)
    hit, over = read_events(tmp_path)
    assert (hit["event"], over["event"], over["index"], over["pid"]) == ("fault", "fault_over", 0, hit["pid"])
    assert over["seconds"] >= 0.1


@pytest.mark.usefixtures("armed")
def test_loss_is_nan_once(plan: Plan) -> None:
    faults = plan({**RAISE, "kind": "nan", "point": "forward"})
    loss = torch.tensor(2.0)
    losses = [faults.in_forward(loss, step=step).item() for step in (2, 3, 3)]
    assert [math.isnan(found) for found in losses] == [False, True, False]


KILLED = """
import sys
from pathlib import Path
from tests.training.test_faults import make_plan
fault = {"kind": "sigkill", "rank": 1, "step": 1, "point": "forward"}
faults, events = make_plan(Path(sys.argv[1]), fault)
faults.in_step("forward", step=1)
"""


@pytest.mark.usefixtures("armed")
def test_sigkill_leaves_its_event_first(tmp_path: Path) -> None:
    root = Path(__file__).parents[2]
    process = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path)], cwd=root, timeout=60, check=False)
    assert process.returncode == -signal.SIGKILL
    assert seen(tmp_path) == [("fault", "sigkill", 1, "forward")]
