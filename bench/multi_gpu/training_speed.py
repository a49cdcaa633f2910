"""Section 1: how fast the trainer trains, without and with everything that makes it resilient.

`off`: torchrun, no restart layer, no snapshot, no checkpoint. `on`: `training launch` with both layers, a
snapshot at every step (if "auto" finds it free), and a durable checkpoint of whose writing the last
window pays for all. Single-GPU runs go side by side, one a GPU, so that each GPU is its own reference.
"""

from __future__ import annotations

import contextlib
import shutil
import statistics
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from bench.multi_gpu import machine, recipes
from bench.multi_gpu.recipes import Workload
from bench.multi_gpu.runs import (
    Event,
    Run,
    Settings,
    by_launch,
    by_torchrun,
    seconds_per_step,
    steps_of_rank_0,
    wait_for,
)
from k8s.model_size import parameter_count, state_bytes
from training.config import load_recipe
from training.throughput import peak_flops_of

_START_SECONDS = 120.0
_OFF: dict[str, Any] = {
    "snapshot": {"every_steps": 0},
    "checkpoint": {"writer": "dcp_sync"},
    "recovery": {"layers": "none"},
}


@dataclass(frozen=True, kw_only=True, slots=True)
class SpeedCase:
    """One workload at one number of ranks, in one mode."""

    workload: Workload
    ranks: int
    resilient: bool
    repetition: int = 0
    warm_up_steps: int = 8
    window_steps: int = 30
    save_step: int = 72
    """Step of the durable checkpoint; snapshots alone are measured before it."""
    longest_step_seconds: float = 1.2

    @property
    def name(self) -> str:
        mode = "on" if self.resilient else "off"
        extra = f" #{self.repetition}" if self.repetition else ""
        return f"speed {self.workload.name} x{self.ranks} {mode}{extra}"


def measure(case: SpeedCase, settings: Settings) -> list[dict[str, Any]]:
    """Run a case and return its rows: one a run and window."""
    copies = max(1, settings.gpus // case.ranks) if case.ranks == 1 else 1
    root = settings.directory / case.name.replace(" ", "-").replace("/", "_").replace("#", "")
    shutil.rmtree(root, ignore_errors=True)
    recipe = _write_recipe(case, root, settings)
    with contextlib.ExitStack() as stack:
        runs = [stack.enter_context(_run(case, recipe, root, number, settings)) for number in range(copies)]
        last = _last_step(case)
        wait_for(
            runs, lambda run: run.step() > last, seconds=_START_SECONDS + last * case.longest_step_seconds
        )
        memory = machine.gpu_memory_gib()
    rows = []
    for number, run in enumerate(runs):
        facts = _facts(case, recipe, copies, settings)
        if memory:
            facts["gpu_memory_gib"] = round(max(memory) if copies == 1 else memory[number], 1)
        for what, first, until in _windows(case, run.events):
            seconds = seconds_per_step(run.events, first=first, last=until)
            rows.append({**facts, "gpu": number, "window": what, **_speed(case, seconds, facts)})
            rows[-1].update(steps=until + 1 - first, median_ms=_median_ms(run.events, first, until))
            if case.resilient:
                rows[-1].update(_snapshots(run.events), **_drain(run.events))
    return rows


def _write_recipe(case: SpeedCase, root: Path, settings: Settings) -> Path:
    tables = {} if case.resilient else _OFF
    if case.resilient:
        tables = {"checkpoint": {"every_steps": case.save_step, "deadline_seconds": 300.0}}
        if settings.device == "cpu":
            tables["snapshot"] = {"every_steps": 1}
    found = recipes.recipe(
        case.workload,
        name="speed",
        data=settings.data,
        nodes=1,
        ranks_per_node=case.ranks,
        device=settings.device,
        **tables,
    )
    return recipes.write(root / "recipe.toml", found)


def _run(case: SpeedCase, recipe: Path, root: Path, number: int, settings: Settings) -> Run:
    run_dir = root / f"run-{number}"
    command = by_launch(recipe, run_dir) if case.resilient else by_torchrun(recipe, run_dir, ranks=case.ranks)
    own = {"CUDA_VISIBLE_DEVICES": str(number)} if settings.device == "cuda" and case.ranks == 1 else {}
    return Run(name=f"{root.name}-{number}", command=command, directory=run_dir, environ=own)


def _last_step(case: SpeedCase) -> int:
    return (case.save_step if case.resilient else case.warm_up_steps) + case.window_steps


def _windows(case: SpeedCase, events: Sequence[Event]) -> Iterator[tuple[str, int, int]]:
    """Yield (what goes on, first step, last step)."""
    if not case.resilient:
        yield "nothing", case.warm_up_steps + 1, case.warm_up_steps + case.window_steps
        return
    settled = _settled_step(events)
    first = max(case.warm_up_steps, settled + 2, case.save_step - case.window_steps)
    if first < case.save_step - 1:
        yield "snapshots" if settled else "snapshots, unsettled", first, case.save_step - 1
    yield "snapshots and a save", case.save_step, case.save_step + case.window_steps - 1


def _settled_step(events: Sequence[Event]) -> int:
    """Return the step at which "auto" has decided on the interval of snapshots."""
    decided = [float(event["time"]) for event in events if event["event"] == "snapshot_interval"]
    until = decided[-1] if decided else 0.0
    return max((int(e["step"]) for e in steps_of_rank_0(events) if float(e["start"]) <= until), default=0)


def _snapshots(events: Sequence[Event]) -> dict[str, Any]:
    decided = [event for event in events if event["event"] == "snapshot_interval"]
    skipped = [event for event in events if event["event"] == "snapshot"]
    found: dict[str, Any] = {"snapshots_skipped": len(skipped)}
    if decided:
        found.update(snapshot_every_steps=decided[-1]["every_steps"], reason=decided[-1]["reason"])
    return found


def _drain(events: Sequence[Event]) -> dict[str, Any]:
    """Return what the durable checkpoint took on the training thread and behind it."""
    saves = [event for event in events if event.get("name") == "save" and event.get("rank") == 0]
    at = {
        event["status"]: float(event["time"])
        for event in events
        if event["event"] == "checkpoint" and event.get("status") in ("scheduled", "committed")
    }
    found: dict[str, Any] = {}
    if saves:
        found["save_call_ms"] = round(1e3 * float(saves[-1]["seconds"]), 2)
    if len(at) > 1:
        found["drain_seconds"] = round(at["committed"] - at["scheduled"], 2)
    return found


def _facts(case: SpeedCase, recipe: Path, copies: int, settings: Settings) -> dict[str, Any]:
    config = load_recipe(recipe)
    return {
        "section": "speed",
        "model": case.workload.model,
        "workload": case.workload.name,
        "ranks": case.ranks,
        "side_by_side": copies,
        "resilience": "on" if case.resilient else "off",
        "repetition": case.repetition,
        "parameters": parameter_count(config),
        "state_gb": round(state_bytes(config) / 1e9, 2),
        "device": settings.device,
    }


def _speed(case: SpeedCase, seconds: float, facts: dict[str, Any]) -> dict[str, Any]:
    workload = case.workload
    tokens = workload.sequence_length_tokens * workload.samples_per_rank / seconds
    found = {"step_ms": round(1e3 * seconds, 3), "tokens_per_second_per_gpu": round(tokens, 1)}
    peak = peak_flops_of(machine.gpu_name())
    if peak and facts["device"] == "cuda":
        per_token = flops_per_token(workload, int(facts["parameters"]))
        found["mfu_percent"] = round(100 * tokens * per_token / peak, 2)
    return found


def flops_per_token(workload: Workload, parameters: int) -> float:
    """Return training FLOPs a token, as `training.throughput` counts them."""
    fields = recipes.MODELS[workload.model]
    layers, width = fields["num_hidden_layers"], fields["hidden_size"]
    untied = 0 if fields["tie_word_embeddings"] else fields["vocab_size"] * width
    return float(6 * (parameters - untied) + 12 * layers * width * workload.sequence_length_tokens)


def _median_ms(events: Sequence[Event], first: int, last: int) -> float:
    starts = {int(event["step"]): float(event["start"]) for event in steps_of_rank_0(events)}
    return round(1e3 * statistics.median(starts[n + 1] - starts[n] for n in range(first, last + 1)), 3)
