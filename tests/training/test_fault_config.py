from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_recipe
from training.config import JobConfig
from training.errors import ConfigError

KILL = {"kind": "sigkill", "rank": 0, "step": 5, "point": "backward"}


def recipe(*faults: dict[str, Any], layers: str = "both", **sections: Any) -> JobConfig:
    sections = {
        "training": {"steps": 12},
        "checkpoint": {"writer": "holdfast", "every_steps": 4},
        "recovery": {"layers": layers, "group_timeout_seconds": 5.0},
        **sections,
    }
    return tiny_recipe(Path("data"), ranks=2, rehearsal={"faults": list(faults)}, **sections)


@pytest.mark.parametrize(
    ("fault", "message"),
    [
        ({"kind": "nan", "point": "backward"}, "point='backward': must be one of forward for kind='nan'"),
        ({"kind": "nan", "point": "forward"}, "kind='nan': only non_finite_loss='roll_back' ends with"),
        ({"point": "sve"}, "point='sve': must be one of setup, rendezvous, restore, forward, backward"),
        ({"point": "forward", "step": 0}, "step=0: must be at least 1 at point='forward'"),
        ({"point": "restore", "step": 6}, "step=6: point='restore' needs another fault that restarts"),
        ({"kind": "slow", "seconds": 5.0}, "seconds=5.0: must be below 5, the shortest limit"),
        ({"kind": "corrupt_checkpoint", "step": 8}, "step=8: must be above 2 x checkpoint.every_steps=4"),
        ({"kind": "corrupt_snapshot", "step": 1}, "step=1: must come after a first snapshot"),
        ({"kind": "corrupt_snapshot", "point": "save"}, "point='save': must be one of forward, backward"),
        ({"kind": "full_disk", "step": 9}, "step=9: must be at most 8: the run's last save must not fail"),
    ],
)
def test_fault_that_cannot_be_done_is_refused(fault: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        recipe(KILL, {**KILL, **fault})
    assert f"rehearsal.faults[1].{message}" in str(caught.value)


@pytest.mark.parametrize(
    ("layers", "kind", "allowed"),
    [
        ("none", "slow", True),
        ("none", "exception", False),
        ("in_process", "exception", True),
        ("in_process", "sigkill", False),
        ("in_job", "sigkill", True),
        ("in_job", "exception", True),
    ],
)
def test_fault_needs_a_layer_that_recovers_from_it(layers: str, kind: str, allowed: bool) -> None:
    fault = {**KILL, "kind": kind}
    if allowed:
        recipe(fault, layers=layers)
        return
    with pytest.raises(ConfigError, match=f"kind='{kind}': recovery.layers='{layers}' does not recover"):
        recipe(fault, layers=layers)


def test_setup_faults_hit_at_the_start_or_after_a_restart() -> None:
    at_start = {**KILL, "point": "rendezvous", "step": 0}
    after_restart = {**KILL, "kind": "exception", "rank": 1, "point": "restore"}
    faults = recipe(KILL, at_start, after_restart).rehearsal.faults
    assert [fault.in_setup for fault in faults] == [False, True, True]


def test_slow_rank_leads_to_no_restart() -> None:
    slow = {**KILL, "kind": "slow"}
    with pytest.raises(ConfigError, match="needs another fault that restarts"):
        recipe(slow, {**KILL, "point": "setup"})
