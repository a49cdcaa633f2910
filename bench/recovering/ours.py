"""Holdfast under the same faults: `training rehearse`, one fault a run."""

from __future__ import annotations

import json
import subprocess
import sys
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import RunError
from training.events import read_events
from training.fault_config import Fault, FaultKind
from training.rehearsal.plan_file import write_recipe

KINDS: dict[str, FaultKind] = {
    "worker": "sigkill",
    "launcher": "launcher_kill",
    "node with spare": "node_loss",
    "control store": "control_loss",
}

_REHEARSAL_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Setting:
    """What is rehearsed."""

    recipe: Path
    directory: Path
    step: int
    """Step that the fault hits."""
    rank: int


def measure(fault: str, setting: Setting) -> dict[str, Any]:
    """Rehearse one fault and return its row."""
    plan = [Fault(kind=KINDS[fault], rank=setting.rank, step=setting.step)]
    name = fault.replace(" ", "-")
    recipe, _ = write_recipe(setting.recipe, plan, setting.directory / name)
    verdict = _rehearse(recipe, setting.directory / f"{name}-run", setting.directory / "undisturbed")
    (judged,) = verdict["faults"]
    row = {
        "system": "Holdfast",
        "fault": fault,
        "seconds": round(sum(judged["phases"].values()), 3) if judged["recovered"] else None,
        "steps_lost": judged["steps_lost"],
        "state": judged["source"],
        "phases": {key: round(value, 3) for key, value in judged["phases"].items()},
        "passed": verdict["passed"],
    }
    if fault == "control store":
        row["steps_without_store"] = _steps_without_store(setting.directory / f"{name}-run" / "disturbed")
    return row


def _rehearse(recipe: Path, run_dir: Path, undisturbed: Path) -> dict[str, Any]:
    command = [sys.executable, "-m", "training", "rehearse", str(recipe), "--json"]
    options: Sequence[str] = ["--run-dir", str(run_dir), "--undisturbed", str(undisturbed)]
    try:
        done = subprocess.run(
            [*command, *options], stdout=subprocess.PIPE, text=True, timeout=_REHEARSAL_SECONDS
        )
    except subprocess.TimeoutExpired as error:
        raise RunError(f"rehearsal: not done after {_REHEARSAL_SECONDS:g} s") from error
    if not done.stdout:
        raise RunError(f"rehearsal: ended with {done.returncode}; its reason is above")
    verdict: dict[str, Any] = json.loads(done.stdout)
    return verdict


def _steps_without_store(run_dir: Path) -> int:
    """Return how many steps were done from the store's death until ranks were started anew."""
    events = read_events(run_dir)
    lost = next(event["time"] for event in events if event["event"] == "fault")
    again = next((e["time"] for e in events if e["event"] == "round" and e["time"] > lost), float("inf"))
    done = {e["step"] for e in events if e["event"] == "step" and lost < e["start"] + e["seconds"] < again}
    return len(done)
