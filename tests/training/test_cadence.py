"""How often snapshots are taken: measured, decided once, by all ranks alike."""

from __future__ import annotations

from collections.abc import Sequence

import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.cadence import COST_LIMIT, Cadence, interval_for


@pytest.mark.parametrize(
    ("cost_ms", "step_ms", "every_steps"),
    [(0.0, 500.0, 1), (0.4, 500.0, 1), (2.5, 500.0, 1), (2.6, 500.0, 2), (250.0, 500.0, 100)],
)
def test_smallest_interval_that_costs_half_a_percent(
    cost_ms: float, step_ms: float, every_steps: int
) -> None:
    assert interval_for(cost_seconds=cost_ms / 1e3, step_seconds=step_ms / 1e3) == every_steps


@given(st.floats(0, 100), st.floats(1e-3, 1000))
def test_never_costs_more(cost_seconds: float, step_seconds: float) -> None:
    every = interval_for(cost_seconds=cost_seconds, step_seconds=step_seconds)
    assert cost_seconds / (every * step_seconds) <= COST_LIMIT * (1 + 1e-9)


def trained(steps: Sequence[float], costs: Sequence[float]) -> Cadence:
    """Return a rank's cadence after steps that took so long, each with a snapshot that cost so much."""
    cadence, now = Cadence(setting="auto"), 0.0
    cadence.measure(now=now, costs_seconds=[])
    for seconds, cost in zip(steps, costs, strict=True):
        now += seconds
        cadence.measure(now=now, costs_seconds=[cost])
    return cadence


def summed(ranks: Sequence[Cadence]) -> tuple[float, float, float]:
    offered, cost, step = (sum(values) for values in zip(*(rank.offer() for rank in ranks), strict=True))
    return offered, cost, step


def test_all_ranks_decide_the_same_and_say_why() -> None:
    quick, slow = trained([0.1] * 8, [0.0006] * 8), trained([0.1] * 8, [0.003] * 8)
    offers = summed([quick, slow])
    reasons = {rank.decide(offers, ranks=2) for rank in (quick, slow)}
    assert reasons == {"a snapshot holds a step of 100.0 ms up for 1.80 ms: every 4 steps cost 0.45%"}
    assert quick.every_steps == slow.every_steps == 4
    assert [step for step in range(1, 10) if quick.due(step)] == [4, 8]


def test_nobody_decides_before_all_have_measured() -> None:
    early, late = trained([0.1] * 8, [0.0] * 8), trained([0.1] * 7, [0.0] * 7)
    assert early.decide(summed([early, late]), ranks=2) is None
    assert early.every_steps == 1 and not early.decided


def test_one_step_that_waited_for_something_else_decides_nothing() -> None:
    cadence = trained([0.1] * 4 + [9.2] + [0.1] * 3, [0.0] * 5 + [3.0] + [0.0] * 2)
    cadence.decide(summed([cadence]), ranks=1)
    assert cadence.every_steps == 1


def test_decides_once_and_anew_after_a_restore() -> None:
    cadence = trained([0.1] * 8, [0.001] * 8)
    assert cadence.decide(summed([cadence]), ranks=1) is not None
    assert cadence.offer() == (0.0, 0.0, 0.0)
    assert cadence.decide((1.0, 0.5, 0.1), ranks=1) is None
    cadence.reset()
    assert cadence.every_steps == 1 and not cadence.decided


def train_in_background(cadence: Cadence, *, plain_seconds: float, cost_seconds: float) -> int:
    """Train until the cadence is decided; a step's time is known a step late. Return the steps."""
    times, now, step = [plain_seconds, plain_seconds], 0.0, 0
    while not cadence.decided:
        step += 1
        times.append(plain_seconds + cost_seconds * cadence.due(step))
        now += times.pop(0)
        cadence.measure(now=now, costs_seconds=[0.0])
        cadence.decide(cadence.offer(), ranks=1)
    return step


@pytest.mark.parametrize(("cost_seconds", "every_steps"), [(0.0, 1), (0.0036, 3), (-0.001, 1), (0.09, 52)])
def test_copies_in_the_background_cost_the_difference_between_steps(
    cost_seconds: float, every_steps: int
) -> None:
    cadence = Cadence(setting="auto", in_background=True)
    assert train_in_background(cadence, plain_seconds=0.347, cost_seconds=cost_seconds) <= 22
    assert cadence.every_steps == every_steps


@pytest.mark.parametrize(("setting", "due"), [(3, [3, 6, 9]), (0, [])])
def test_a_number_is_taken_as_it_is(setting: int, due: list[int]) -> None:
    cadence = Cadence(setting=setting)
    assert cadence.decided
    assert [step for step in range(1, 10) if cadence.due(step)] == due
