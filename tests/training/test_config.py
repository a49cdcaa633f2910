from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_recipe
from training.config import RecoveryConfig, check_timeouts, load_recipe
from training.errors import ConfigError


@pytest.mark.parametrize(
    ("sections", "message"),
    [
        ({"job": {"ranks_per_node": 3}}, "data.global_batch_samples=8: must be a multiple of"),
        ({"job": {"replicas": 3, "ranks_per_node": 4}}, "job.replicas=3: must divide the 4 ranks"),
        ({"job": {"spares": 1}}, "job.spares=1: must be below nodes=1"),
        ({"job": {"name": "Llama_3"}}, "job.name='Llama_3': must be 1 to 40 of a-z"),
        ({"training": {"steps": 2}}, "optimizer.warmup_steps=2: must be below training.steps=2"),
        ({"checkpoint": {"keep": 1}}, "checkpoint.keep=1: must be at least 2"),
        ({"checkpoint": {"writer": "torch"}}, "checkpoint.writer='torch': must be one of holdfast"),
        ({"model": {"config": {}}}, "model.source='': needs model.source, or a config table"),
        ({"model": {"weights": "pretrained"}}, "model.weights='pretrained': needs model.source"),
        (
            {"recovery": {"layers": "both", "group_timeout_seconds": 60.0}},
            "recovery.group_timeout_seconds=60.0: must be below soft_timeout_seconds=60 with gloo",
        ),
        (
            {"recovery": {"layers": "both", "soft_timeout_seconds": 95.0}},
            "recovery.soft_timeout_seconds=95.0: must be below hard_timeout_seconds=90",
        ),
        (
            {"rehearsal": {"faults": [{"kind": "exception", "rank": 1, "step": 1}]}},
            "rehearsal.faults[0].rank=1: must be below the 1 ranks",
        ),
        (
            {"rehearsal": {"faults": [{"kind": "exception", "rank": 0, "step": 7}]}},
            "rehearsal.faults[0].step=7: must be within training.steps=6",
        ),
    ],
)
def test_rules_across_fields(tmp_path: Path, sections: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        tiny_recipe(tmp_path, **sections)
    assert message in str(caught.value)


def test_nccl_needs_the_group_timeout_above_the_hard_timeout() -> None:
    recovery = RecoveryConfig(group_timeout_seconds=90.0)
    (problem,) = check_timeouts(recovery, cuda=True)
    assert "must be above hard_timeout_seconds=90 with NCCL" in str(problem)
    assert not list(check_timeouts(RecoveryConfig(), cuda=True))


def test_missing_file_and_broken_toml_name_the_recipe(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"RECIPE='.*none.toml': cannot be read"):
        load_recipe(tmp_path / "none.toml")
    (tmp_path / "broken.toml").write_text("version = \n")
    with pytest.raises(ConfigError, match=r"is not TOML: .*line 1"):
        load_recipe(tmp_path / "broken.toml")
