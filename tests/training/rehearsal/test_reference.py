from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import replaced, tiny_recipe
from training.errors import RunError
from training.rehearsal.reference import Reference

LOSSES = {(0, 1): 0.1 + 0.2, (1, 1): 5.000000000000001}
REFERENCE = Reference(losses=LOSSES, state={"step": 1, "sha256": "ab"})


def test_kept_reference_is_the_same_to_the_last_bit(tmp_path: Path) -> None:
    config = tiny_recipe(tmp_path)
    assert Reference.cached(tmp_path, config) is None
    REFERENCE.save(tmp_path, config)
    assert Reference.cached(tmp_path, config) == REFERENCE


def test_faults_and_limits_are_no_part_of_the_shape(tmp_path: Path) -> None:
    config = tiny_recipe(tmp_path)
    REFERENCE.save(tmp_path, config)
    other = replaced(replaced(config, "recovery", step_timeout_seconds=7.0), "job", spares=0, name="other")
    assert Reference.cached(tmp_path, other) == REFERENCE


def test_reference_of_another_recipe_is_refused(tmp_path: Path) -> None:
    REFERENCE.save(tmp_path, tiny_recipe(tmp_path))
    other = replaced(tiny_recipe(tmp_path), "training", seed=1)
    with pytest.raises(RunError, match="is the run of another recipe; give another directory"):
        Reference.cached(tmp_path, other)
