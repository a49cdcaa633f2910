"""Random fault plans that the recipe's layers can heal; equal for the same recipe, seed and count."""

from __future__ import annotations

import random
from collections.abc import Iterator, Sequence
from typing import get_args

from training.config import JobConfig
from training.errors import ConfigError
from training.fault_config import (
    SETUP_POINTS,
    STEP_POINTS,
    Fault,
    FaultKind,
    can_recover,
    last_regular_save,
    points_of,
    slow_limit_seconds,
    snapshot_interval_steps,
)

# Steps from one fault to the next, so that a restored run gets past the first before the second hits.
MINIMUM_GAP_STEPS = 2
# Share of the restarts whose set-up is hit too.
SETUP_SHARE = 0.2
_SLOW_SECONDS = 1.0
# A set-up is hit by these only: the others need a step, or something to damage.
_SETUP_KINDS: tuple[FaultKind, ...] = ("exception", "sigkill", "launcher_kill", "slow")
_KINDS: tuple[FaultKind, ...] = get_args(FaultKind)


def random_plan(config: JobConfig, seed: int, count: int) -> tuple[Fault, ...]:
    """Return a plan, ordered by step.

    Args:
        config: The recipe; its own faults are left aside.
        seed: Chooses the plan.
        count: Faults.

    Raises:
        ConfigError: There are none, or the run is too short for so many.
    """
    if count < 1:
        raise ConfigError.of("--random-faults", count, "must be at least 1", "raise it")
    generator = random.Random(f"{seed}/{count}")
    faults: list[Fault] = []
    steps = _steps(config, generator, count)
    while len(faults) < count:
        fault = _fault(config, generator, next(steps))
        faults.append(fault)
        if fault.restarts and len(faults) < count and generator.random() < SETUP_SHARE:
            faults += _setup_fault(config, generator, fault)
    return tuple(faults)


def _steps(config: JobConfig, generator: random.Random, count: int) -> Iterator[int]:
    """Yield steps in order, far enough apart; the last two stay free, for the run to end undisturbed."""
    places = range(1, config.training.steps - 1, MINIMUM_GAP_STEPS)
    if count > len(places):
        rule = f"is too short for {count} faults, {MINIMUM_GAP_STEPS} steps apart"
        fix = f"use at least {count * MINIMUM_GAP_STEPS + 2} steps, or fewer faults"
        raise ConfigError.of("training.steps", config.training.steps, rule, fix)
    return iter(sorted(generator.sample(places, count)))


def _fault(config: JobConfig, generator: random.Random, step: int) -> Fault:
    kind = generator.choice([kind for kind in _KINDS if _fits(config, kind, step)])
    return Fault(
        kind=kind,
        rank=generator.randrange(config.job.world_size),
        step=step,
        point=generator.choice(points_of(kind, STEP_POINTS)),
        seconds=_seconds(config),
    )


def _setup_fault(config: JobConfig, generator: random.Random, cause: Fault) -> Sequence[Fault]:
    kinds = [kind for kind in _SETUP_KINDS if can_recover(kind, config)]
    return [
        Fault(
            kind=generator.choice(kinds),
            rank=generator.randrange(config.job.world_size),
            step=cause.step,
            point=generator.choice(SETUP_POINTS),
            seconds=_seconds(config),
        )
    ]


def _fits(config: JobConfig, kind: FaultKind, step: int) -> bool:
    """Say whether a fault can be delivered at this step, and healed."""
    if kind == "corrupt_checkpoint":
        # one step later than the rule: a save may have been put off
        return can_recover(kind, config) and step > 2 * config.checkpoint.every_steps + 1
    if kind == "corrupt_snapshot":
        return can_recover(kind, config) and 0 < 2 * snapshot_interval_steps(config) < step
    if kind == "full_disk":
        return config.checkpoint.writer == "holdfast" and step <= last_regular_save(config)
    return can_recover(kind, config)


def _seconds(config: JobConfig) -> float:
    return min(_SLOW_SECONDS, slow_limit_seconds(config) / 4)
