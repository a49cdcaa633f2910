from __future__ import annotations

import pytest

from k8s.save_time import recommended_capacity_gib, save_seconds
from training.config import JobConfig


@pytest.mark.parametrize(("capacity_gib", "minutes"), [(1200, 13.7), (2400, 6.9), (9600, 1.7)])
def test_an_8b_state_takes_minutes(recipe: JobConfig, capacity_gib: int, minutes: float) -> None:
    assert save_seconds(recipe, capacity_gib=capacity_gib) / 60 == pytest.approx(minutes, abs=0.05)


def test_capacity_comes_in_the_steps_that_fsx_sells(recipe: JobConfig) -> None:
    assert recommended_capacity_gib(recipe, interval_seconds=3600) == 1200
    assert recommended_capacity_gib(recipe, interval_seconds=600) == 2400 * 2
