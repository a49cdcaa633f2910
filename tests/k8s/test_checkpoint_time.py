from __future__ import annotations

import dataclasses

from k8s.checkpoint_time import check_checkpoint_time
from k8s.findings import Finding
from training.config import JobConfig


def only(recipe: JobConfig, *, capacity_gib: int = 1200, step_seconds: float | None = None) -> Finding:
    (finding,) = check_checkpoint_time(recipe, capacity_gib=capacity_gib, step_seconds=step_seconds)
    return finding


def test_without_a_step_time_says_from_which_it_keeps_up(recipe: JobConfig) -> None:
    finding = only(recipe)
    assert finding.level == "OK"
    assert "every_steps=200 keeps up from 6.17 s a step" in finding.message


def test_fast_steps_need_more_capacity_or_fewer_checkpoints(recipe: JobConfig) -> None:
    finding = only(recipe, step_seconds=1.5)
    assert finding.level == "WARN"
    assert finding.fix == "set storage.capacity_gib to 7200, or checkpoint.every_steps to 822"
    assert only(recipe, capacity_gib=7200, step_seconds=1.5).level == "OK"


def test_a_deadline_below_the_time_of_a_save_fails(recipe: JobConfig) -> None:
    checkpoint = dataclasses.replace(recipe.checkpoint, deadline_seconds=300.0)
    findings = check_checkpoint_time(
        dataclasses.replace(recipe, checkpoint=checkpoint), capacity_gib=1200, step_seconds=None
    )
    assert [finding.level for finding in findings] == ["FAIL", "OK"]
