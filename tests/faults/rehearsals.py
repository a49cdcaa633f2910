"""Runs `training rehearse` on a tiny recipe with a list of faults, as a user would."""

from __future__ import annotations

import json
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from tests.faults.clean_machine import CleanMachine
from tests.tiny import MODEL_TOML
from training.fault_config import Fault
from training.rehearsal.plan_file import write_recipe

ROOT = Path(__file__).parents[2]
# Small enough that a step takes some milliseconds; limits that a busy machine keeps.
RECIPE = """
version = 1
[job]
name = "faults"
nodes = {nodes}
ranks_per_node = {ranks_per_node}
spares = {spares}
{model}[data]
path = "{data}"
sequence_length_tokens = 32
global_batch_samples = 4
[training]
steps = {steps}
device = "cpu"
non_finite_loss = "{non_finite_loss}"
[checkpoint]
every_steps = {every_steps}
deadline_seconds = 60.0
overlap = "{overlap}"
[snapshot]
every_steps = 1
[recovery]
layers = "{layers}"
group_timeout_seconds = 5.0
soft_timeout_seconds = 8.0
hard_timeout_seconds = 14.0
barrier_timeout_seconds = 60.0
setup_timeout_seconds = 90.0
step_timeout_seconds = 20.0
checkpoint_timeout_seconds = 60.0
out_of_section_timeout_seconds = 60.0
"""
SHAPE: dict[str, Any] = {
    "nodes": 2,
    "ranks_per_node": 1,
    "spares": 0,
    "steps": 48,
    "every_steps": 6,
    "overlap": "wait",
    "layers": "both",
    "non_finite_loss": "roll_back",
}


def rehearse(
    faults: Sequence[Fault],
    *,
    machine: CleanMachine,
    tmp_path: Path,
    data: Path,
    undisturbed: Path,
    **shape: Any,
) -> dict[str, Any]:
    """Run the plan and return the verdict; the undisturbed run is made once for each shape."""
    settings = {**SHAPE, **shape}
    plain = tmp_path / "plain.toml"
    plain.write_text(RECIPE.format(data=data, model=MODEL_TOML, **settings))
    recipe, _ = write_recipe(plain, faults, tmp_path / "plan")
    kept = undisturbed / "-".join(str(settings[name]) for name in ("nodes", "ranks_per_node", "steps"))
    command = [sys.executable, "-m", "training", "rehearse", str(recipe), "--json"]
    options = ["--run-dir", str(tmp_path / "run"), "--undisturbed", str(kept)]
    done = machine.run([*command, *options], {"HF_HUB_OFFLINE": "1", "PYTHONPATH": str(ROOT)})
    assert done.stdout, done.stderr
    verdict: dict[str, Any] = json.loads(done.stdout)
    return {**verdict, "progress": done.stderr}


def explain(verdict: dict[str, Any]) -> str:
    """Return what went wrong, for the message of a failed assertion."""
    faults = (
        f"{fault['kind']} rank {fault['rank']} step {fault['step']} {fault['point']}: "
        f"recovered={fault['recovered']} evidence={fault['evidence']!r}"
        for fault in verdict["faults"]
    )
    return "\n".join([verdict["verdict"], *faults, verdict["progress"][-4000:]])
