"""Every shipped recipe loads, and says what its name promises."""

from __future__ import annotations

from pathlib import Path

import pytest

from training.config import load_recipe

RECIPES = Path(__file__).parents[2] / "training" / "recipes"


@pytest.mark.parametrize("path", sorted(RECIPES.glob("*.toml")), ids=lambda path: path.stem)
def test_loads(path: Path) -> None:
    load_recipe(path)


@pytest.mark.parametrize(
    ("name", "writer", "layers"),
    [
        ("baseline", "dcp_sync", "none"),
        ("async_only", "holdfast", "none"),
        ("in_process_only", "holdfast", "in_process"),
        ("in_job_only", "holdfast", "in_job"),
        ("combined", "holdfast", "both"),
        ("llama3_8b_p5", "holdfast", "both"),
        ("rehearsal_cpu", "holdfast", "both"),
    ],
)
def test_modes(name: str, writer: str, layers: str) -> None:
    config = load_recipe(RECIPES / f"{name}.toml")
    assert (config.checkpoint.writer, config.recovery.layers) == (writer, layers)
