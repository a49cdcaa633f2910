from __future__ import annotations

import dataclasses
import itertools
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_recipe
from training.config import JobConfig
from training.errors import ConfigError
from training.fault_config import plan_problems
from training.fault_plans import MINIMUM_GAP_STEPS, random_plan


def recipe(layers: str = "both", **training: Any) -> JobConfig:
    return tiny_recipe(
        Path("data"),
        ranks=4,
        training={"steps": 60, "device": "cpu", **training},
        checkpoint={"writer": "holdfast", "every_steps": 5},
        recovery={"layers": layers, "group_timeout_seconds": 5.0},
    )


def test_same_seed_gives_the_same_plan() -> None:
    assert random_plan(recipe(), 7, 12) == random_plan(recipe(), 7, 12)
    assert random_plan(recipe(), 7, 12) != random_plan(recipe(), 8, 12)


@pytest.mark.parametrize("layers", ["none", "in_process", "in_job", "both"])
@pytest.mark.parametrize("policy", ["stop", "roll_back"])
def test_every_plan_keeps_the_rules_of_a_recipe(layers: str, policy: str) -> None:
    config = recipe(layers, non_finite_loss=policy)
    for seed in range(100):
        faults = random_plan(config, seed, 20)
        assert len(faults) == 20
        planned = dataclasses.replace(config, rehearsal=dataclasses.replace(config.rehearsal, faults=faults))
        assert list(plan_problems(planned)) == []


def test_plans_reach_all_kinds_points_and_ranks() -> None:
    config = recipe(non_finite_loss="roll_back")
    faults = [fault for seed in range(50) for fault in random_plan(config, seed, 20)]
    assert len({fault.kind for fault in faults}) == 13
    assert {fault.rank for fault in faults} == set(range(4))
    assert len({fault.point for fault in faults}) == 8


def test_faults_in_steps_lie_apart() -> None:
    for seed in range(50):
        steps = [fault.step for fault in random_plan(recipe(), seed, 20) if not fault.in_setup]
        gaps = [after - before for before, after in itertools.pairwise(steps)]
        assert min(gaps) >= MINIMUM_GAP_STEPS


def test_too_many_faults_are_refused() -> None:
    with pytest.raises(ConfigError, match=r"training\.steps=60: is too short for 40 faults"):
        random_plan(recipe(), 1, 40)


@pytest.mark.parametrize("count", [0, -1])
def test_a_plan_without_faults_is_refused(count: int) -> None:
    with pytest.raises(ConfigError, match=f"--random-faults={count}: must be at least 1"):
        random_plan(recipe(), 1, count)
