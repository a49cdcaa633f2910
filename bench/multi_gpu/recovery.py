"""Section 3: faults over NCCL, fault to first new step by phase.

`measure_times` lets faults hit a run of the 1B model on one node: NVLink between the ranks. `measure_verdict`
is `training rehearse` of a smaller model with deterministic kernels: the same faults, the steps undisturbed,
and whether loss and state are equal bit for bit. With a node a rank, NCCL talks over the network transport.
"""

from __future__ import annotations

import json
import logging
import shutil
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.multi_gpu import recipes
from bench.multi_gpu.recipes import Workload
from bench.multi_gpu.runs import BenchmarkError, Run, Settings, by_launch, wait_for
from training import environment
from training.config import load_recipe
from training.events import read_events
from training.goodput import ledger
from training.rehearsal.verdict import FaultOutcome, judge_faults

logger = logging.getLogger("bench.multi_gpu")

_LIMIT_SECONDS = 240.0
_STEPS_AFTER_LAST = 5
_FIELDS = ("kind", "rank", "step", "point", "recovered", "layer", "steps_lost")


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryCase:
    """Faults that hit one run."""

    name: str
    workload: Workload
    faults: tuple[Mapping[str, Any], ...]
    steps: int
    nodes: int = 1
    spares: int = 0
    save_every_steps: int = 1_000_000


def fault(kind: str, *, rank: int, step: int, point: str = "backward") -> dict[str, Any]:
    """Return one planned fault."""
    return {"kind": kind, "rank": rank, "step": step, "point": point}


def measure_times(case: RecoveryCase, settings: Settings) -> list[dict[str, Any]]:
    """Let the faults hit, end the run a few steps later, and return one row a fault."""
    root = _fresh_directory(case, settings)
    recipe = recipes.write(root / "recipe.toml", _recipe(case, settings, deterministic=False))
    run = Run(
        name=root.name,
        command=by_launch(recipe, root / "run"),
        directory=root / "run",
        environ={environment.REHEARSAL: "1"},
    )
    last = int(case.faults[-1]["step"]) + _STEPS_AFTER_LAST
    with run:
        try:
            wait_for([run], lambda found: found.step() >= last, seconds=_LIMIT_SECONDS)
        except BenchmarkError as error:  # what was recovered until then is a result
            logger.error("%s: %s", case.name, error)
    events = read_events(root / "run")
    outcomes = judge_faults(load_recipe(recipe).rehearsal.faults, events, ledger(events).restarts)
    common = {"section": "recovery", "model": case.workload.name, "ranks": settings.gpus, "nodes": case.nodes}
    return [{**common, **_row(outcome)} for outcome in outcomes]


def measure_verdict(case: RecoveryCase, settings: Settings) -> list[dict[str, Any]]:
    """Rehearse a case and return one row a fault."""
    root = _fresh_directory(case, settings)
    recipe = recipes.write(root / "recipe.toml", _recipe(case, settings, deterministic=True))
    run_dir = root / "run"
    command = [sys.executable, "-m", "training", "rehearse", str(recipe), "--run-dir", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    for name in ("disturbed", "undisturbed"):
        shutil.rmtree(run_dir / name / "checkpoints", ignore_errors=True)
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise BenchmarkError(f"{case.name}: ended with {done.returncode}\n{done.stderr[-3000:]}")
    verdict = json.loads(lines[-1])
    common = {"section": "verdict", "model": case.workload.name, "ranks": settings.gpus, "nodes": case.nodes}
    return [{**common, **_row(FaultOutcome(**found)), **_verdict(verdict)} for found in verdict["faults"]]


def _fresh_directory(case: RecoveryCase, settings: Settings) -> Path:
    root = settings.directory / case.name.replace(" ", "-")
    shutil.rmtree(root, ignore_errors=True)
    return root


def _recipe(case: RecoveryCase, settings: Settings, *, deterministic: bool) -> dict[str, Any]:
    timeouts = {"soft_timeout_seconds": 8.0, "hard_timeout_seconds": 16.0, "barrier_timeout_seconds": 60.0}
    if settings.device == "cpu":
        timeouts.update(group_timeout_seconds=4.0, soft_timeout_seconds=20.0, hard_timeout_seconds=40.0)
        timeouts["barrier_timeout_seconds"] = 90.0
    return recipes.recipe(
        case.workload,
        name="recovery",
        data=settings.data,
        nodes=case.nodes,
        ranks_per_node=settings.gpus // case.nodes,
        device=settings.device,
        job={"spares": case.spares},
        training={"steps": case.steps, "deterministic": deterministic, "log_every_steps": 10},
        checkpoint={"every_steps": case.save_every_steps, "overlap": "wait", "deadline_seconds": 120.0},
        snapshot={"every_steps": 1},
        recovery=timeouts,
        rehearsal={"faults": list(case.faults)},
    )


def _row(outcome: FaultOutcome) -> dict[str, Any]:
    phases = {name: round(seconds, 3) for name, seconds in outcome.phases.items() if seconds}
    first_step = phases.get("first step", 0.0)
    return {
        **{name: getattr(outcome, name) for name in _FIELDS},
        "phases": phases,
        "restored_from": outcome.source,
        "new_step_seconds": round(sum(phases.values()), 2),
        "state_loaded_seconds": round(sum(phases.values()) - first_step, 2),
    }


def _verdict(verdict: Mapping[str, Any]) -> dict[str, Any]:
    return {name: verdict[name] for name in ("identical_loss", "identical_params", "goodput_percent")}
