"""Section 3: faults over NCCL, each rank a simulated node with a GPU of its own.

`training rehearse` runs the faults and the same steps undisturbed, and judges. The time that counts here is
from the fault to the metrics of the first new step, on the rank that is last.
"""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from bench.multi_gpu import recipes
from bench.multi_gpu.recipes import Workload
from bench.multi_gpu.runs import BenchmarkError, Event, Settings
from training.events import read_events

_LIMIT_SECONDS = 330.0


@dataclass(frozen=True, kw_only=True, slots=True)
class RecoveryCase:
    """Faults that hit one run."""

    name: str
    workload: Workload
    faults: tuple[Mapping[str, Any], ...]
    steps: int
    spares: int = 0
    save_every_steps: int = 1_000_000


def fault(kind: str, *, rank: int, step: int, point: str = "backward") -> dict[str, Any]:
    """Return one planned fault."""
    return {"kind": kind, "rank": rank, "step": step, "point": point}


def measure(case: RecoveryCase, settings: Settings) -> list[dict[str, Any]]:
    """Rehearse a case and return one row a fault."""
    root = settings.directory / case.name.replace(" ", "-")
    shutil.rmtree(root, ignore_errors=True)
    recipe = recipes.write(root / "recipe.toml", _recipe(case, settings))
    run_dir = root / "run"
    command = [sys.executable, "-m", "training", "rehearse", str(recipe), "--run-dir", str(run_dir), "--json"]
    done = subprocess.run(command, capture_output=True, text=True, timeout=_LIMIT_SECONDS, check=False)
    shutil.rmtree(run_dir / "undisturbed" / "checkpoints", ignore_errors=True)
    shutil.rmtree(run_dir / "disturbed" / "checkpoints", ignore_errors=True)
    lines = done.stdout.strip().splitlines()
    if not lines:
        raise BenchmarkError(f"{case.name}: ended with {done.returncode}\n{done.stderr[-3000:]}")
    verdict = json.loads(lines[-1])
    events = read_events(run_dir / "disturbed")
    return [
        {**_row(planned, events), **_verdict(verdict), "section": "recovery", "ranks": settings.gpus}
        for planned in verdict["faults"]
    ]


def _recipe(case: RecoveryCase, settings: Settings) -> dict[str, Any]:
    timeouts = {"soft_timeout_seconds": 8.0, "hard_timeout_seconds": 16.0, "barrier_timeout_seconds": 60.0}
    if settings.device == "cpu":
        timeouts.update(group_timeout_seconds=4.0, soft_timeout_seconds=20.0, hard_timeout_seconds=40.0)
        timeouts["barrier_timeout_seconds"] = 90.0
    return recipes.recipe(
        case.workload,
        name="recovery",
        data=settings.data,
        nodes=settings.gpus,
        ranks_per_node=1,
        device=settings.device,
        job={"spares": case.spares},
        training={"steps": case.steps, "deterministic": True, "log_every_steps": 10},
        checkpoint={"every_steps": case.save_every_steps, "overlap": "wait", "deadline_seconds": 120.0},
        snapshot={"every_steps": 1},
        recovery=timeouts,
        rehearsal={"faults": list(case.faults)},
    )


def _row(outcome: Mapping[str, Any], events: Sequence[Event]) -> dict[str, Any]:
    row = {
        name: outcome[name] for name in ("kind", "rank", "step", "point", "recovered", "layer", "steps_lost")
    }
    row["phases"] = {name: round(seconds, 3) for name, seconds in outcome["phases"].items() if seconds}
    hit = next((e for e in events if e["event"] == "fault" and e["index"] == outcome["index"]), None)
    if hit is None:
        return {**row, "recovered": False}
    after = [event for event in events if event["time"] > hit["time"]]
    restored = [event for event in after if event["event"] == "restored"]
    if not restored:
        return row
    step, pid = int(restored[0]["step"]), restored[0]["pid"]
    new = [
        e
        for e in after
        if e["event"] == "metrics" and e["step"] == step + 1 and e["time"] > restored[0]["time"]
    ]
    row["restored_from"] = restored[0]["source"]
    row["restore_phases"] = next(e["phases"] for e in restored if e["pid"] == pid)
    if new:
        row["fault_to_new_step_seconds"] = round(float(new[0]["time"]) - float(hit["time"]), 2)
        row["rebuilt_seconds"] = round(float(restored[0]["time"]) - float(hit["time"]), 2)
    return row


def _verdict(verdict: Mapping[str, Any]) -> dict[str, Any]:
    return {name: verdict[name] for name in ("identical_loss", "identical_params", "goodput_percent")}
