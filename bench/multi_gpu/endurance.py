"""Section 3, last part: restarts in a row must leave nothing behind: device memory, threads, descriptors."""

from __future__ import annotations

import shutil
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from bench.multi_gpu import machine, recipes
from bench.multi_gpu.recipes import Workload
from bench.multi_gpu.recovery import fault
from bench.multi_gpu.runs import Run, Settings, by_launch, wait_for
from training import environment

_START_SECONDS = 120.0
_RESTART_SECONDS = 15.0
_GAP_STEPS = 3


@dataclass(kw_only=True, slots=True)
class _Samples:
    """What every rank holds, taken once a restart, when it has done a step again."""

    by_iteration: dict[int, dict[str, list[float]]] = field(default_factory=dict)

    def look(self, run: Run, ranks: int) -> None:
        """Take a sample if all ranks have done a step in a new iteration."""
        done = [event for event in run.events if event["event"] == "step"]
        newest = max((int(event["iteration"]) for event in done), default=0)
        pids = {event["rank"]: int(event["pid"]) for event in done if event["iteration"] == newest}
        if len(pids) < ranks or newest in self.by_iteration:
            return
        held = [_held(pids[rank]) for rank in sorted(pids)]
        self.by_iteration[newest] = {name: [row[name] for row in held] for name in held[0]}
        memory = machine.gpu_memory_gib()
        if memory:
            self.by_iteration[newest]["gpu_memory_gib"] = [round(value, 2) for value in memory]


def measure(workload: Workload, settings: Settings, *, restarts: int) -> list[dict[str, Any]]:
    """Raise an exception in one rank after the other and return what is held after each restart."""
    faults = [
        fault("exception", rank=number % settings.gpus, step=6 + _GAP_STEPS * number)
        for number in range(restarts)
    ]
    root = settings.directory / "endurance"
    shutil.rmtree(root, ignore_errors=True)
    recipe = recipes.write(root / "recipe.toml", _recipe(workload, settings, faults))
    run = Run(
        name="endurance",
        command=by_launch(recipe, root / "run"),
        directory=root / "run",
        environ={environment.REHEARSAL: "1"},
    )
    samples = _Samples()
    last = int(faults[-1]["step"]) + _GAP_STEPS

    def done(found: Run) -> bool:
        samples.look(found, settings.gpus)
        return found.step() >= last

    with run:
        wait_for([run], done, seconds=_START_SECONDS + _RESTART_SECONDS * restarts)
    return [
        {
            "section": "endurance",
            "restarts": max(samples.by_iteration, default=0),
            "same_process": len({event["pid"] for event in run.events if event["event"] == "step"})
            == settings.gpus,
            "samples": {str(number): held for number, held in samples.by_iteration.items()},
        }
    ]


def _recipe(workload: Workload, settings: Settings, faults: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    cpu = {"group_timeout_seconds": 4.0, "soft_timeout_seconds": 20.0, "hard_timeout_seconds": 40.0}
    return recipes.recipe(
        workload,
        name="endurance",
        data=settings.data,
        nodes=1,
        ranks_per_node=settings.gpus,
        device=settings.device,
        snapshot={"every_steps": 1},
        recovery=cpu if settings.device == "cpu" else {},
        rehearsal={"faults": list(faults)},
    )


def _held(pid: int) -> dict[str, float]:
    """Return what a process holds now."""
    status = Path(f"/proc/{pid}/status").read_text().splitlines()
    fields = dict(line.split(":", 1) for line in status)
    return {
        "threads": float(fields["Threads"]),
        "descriptors": float(len(list(Path(f"/proc/{pid}/fd").iterdir()))),
        "private_gib": round(float(fields["RssAnon"].split()[0]) / 2**20, 3),
    }
