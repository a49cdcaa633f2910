from __future__ import annotations

from pathlib import Path

import pytest

from training.config import load_recipe
from training.errors import ConfigError
from training.fault_config import Fault
from training.rehearsal.plan_file import write_recipe

RECIPE = Path(__file__).parents[3] / "training" / "recipes" / "rehearsal_cpu.toml"
PLAN = (
    Fault(kind="slow", rank=3, step=7, point="forward", seconds=0.5),
    Fault(kind="sigkill", rank=0, step=9),
)


def test_plan_replaces_the_recipes_own(tmp_path: Path) -> None:
    path, config = write_recipe(RECIPE, PLAN, tmp_path / "run")
    assert load_recipe(RECIPE).rehearsal.faults != PLAN
    assert config.rehearsal.faults == load_recipe(path).rehearsal.faults == PLAN
    assert config.recovery == load_recipe(RECIPE).recovery


def test_faults_in_another_form_are_refused(tmp_path: Path) -> None:
    text = RECIPE.read_text().partition("[[rehearsal.faults]]")[0]
    inline = tmp_path / "inline.toml"
    inline.write_text(text + '[rehearsal]\nfaults = [{kind = "sigkill", rank = 0, step = 3}]\n')
    with pytest.raises(ConfigError, match=r"no \[\[rehearsal\.faults\]\] tables"):
        write_recipe(inline, (), tmp_path / "run")
