"""Section 4: a durable checkpoint is written at one number of ranks and read at another, and back."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from typing import Any

from bench.multi_gpu import recipes
from bench.multi_gpu.recipes import Workload
from bench.multi_gpu.runs import Event, Run, Settings, by_launch, wait_for
from k8s.model_size import state_bytes
from training.config import load_recipe

_LEG_SECONDS = 200.0


def measure(workload: Workload, settings: Settings, *, save_every_steps: int) -> list[dict[str, Any]]:
    """Save, resume at half the ranks, save, resume at all; return one row a leg."""
    rows = []
    samples = workload.samples_per_rank * settings.gpus
    root = settings.directory / "durable"
    legs = (settings.gpus, max(1, settings.gpus // 2), settings.gpus)
    shutil.rmtree(root, ignore_errors=True)
    for number, ranks in enumerate(legs):
        tables = recipes.recipe(
            workload,
            name="durable",
            data=settings.data,
            nodes=1,
            ranks_per_node=ranks,
            device=settings.device,
            checkpoint={"every_steps": save_every_steps, "deadline_seconds": 180.0},
        )
        tables["data"]["global_batch_samples"] = samples
        recipe = recipes.write(root / f"recipe-{number}.toml", tables)
        run = Run(
            name=f"durable-{number}",
            command=by_launch(recipe, root / "run"),
            directory=root / "run",
            keep_checkpoints=True,
        )
        with run:
            run.skip_old_events()
            enough = _has_resumed if number == len(legs) - 1 else _has_saved
            wait_for([run], enough, seconds=_LEG_SECONDS)
        size = state_bytes(load_recipe(recipe))
        rows.append({"section": "durable", "leg": number, "ranks": ranks, **_leg(run.events, size)})
    return rows


def _has_resumed(run: Run) -> bool:
    """Say whether a step was done after the restore."""
    return run.step() > 0


def _has_saved(run: Run) -> bool:
    """Say whether a save is durable; it may be later than it was due, once the slots are there."""
    return bool(_committed_steps(run.events))


def _committed_steps(events: Sequence[Event]) -> list[int]:
    return [int(e["step"]) for e in events if e["event"] == "checkpoint" and e["status"] == "committed"]


def _leg(events: Sequence[Event], size_bytes: int) -> dict[str, Any]:
    row: dict[str, Any] = {"state_gb": round(size_bytes / 1e9, 2)}
    restored = [event for event in events if event["event"] == "restored"]
    if restored:
        phases: Mapping[str, float] = restored[0]["phases"]
        slowest = {name: max(float(e["phases"].get(name, 0.0)) for e in restored) for name in phases}
        row.update(
            resumed_at=restored[0]["step"], restored_from=restored[0]["source"], restore_phases=slowest
        )
        row["load_gbps"] = round(size_bytes / 1e9 / max(slowest.get("load", 0.0), 1e-9), 2)
    committed = _committed_steps(events)
    if not committed:
        return row  # the last leg is there to read
    step = committed[0]
    saves = [e for e in events if e.get("name") == "save" and e.get("step") == step]
    marks = {
        e["status"]: float(e["time"]) for e in events if e["event"] == "checkpoint" and e["step"] == step
    }
    row["save_call_ms"] = round(1e3 * max((float(e["seconds"]) for e in saves), default=0.0), 2)
    row["drain_seconds"] = round(marks["committed"] - marks["scheduled"], 2)
    row["drain_gbps"] = round(size_bytes / 1e9 / max(row["drain_seconds"], 1e-9), 2)
    return row
