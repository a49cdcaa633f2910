"""Whether the shared file system takes checkpoints as fast as the recipe makes them."""

from __future__ import annotations

import itertools
from collections.abc import Iterator

from k8s import model_size
from k8s.findings import Finding, fail, ok, warn
from training.config import JobConfig

# SCRATCH_2 writes to its disks; unlike the network, they don't burst (FSx for Lustre, "Performance")
_WRITE_BYTES_PER_SECOND_AND_TIB = 100_000_000
_INTERVAL_TO_SAVE = 1.5
_NAME = "checkpoint time"


def save_seconds(recipe: JobConfig, *, capacity_gib: int) -> float:
    """Return how long a SCRATCH_2 file system takes to write one checkpoint."""
    return model_size.state_bytes(recipe) / (capacity_gib / 1024 * _WRITE_BYTES_PER_SECOND_AND_TIB)


def recommended_capacity_gib(recipe: JobConfig, *, interval_seconds: float) -> int:
    """Return the smallest capacity that keeps up with a checkpoint every `interval_seconds`."""
    capacities = itertools.chain([1200], itertools.count(2400, 2400))
    return next(
        capacity
        for capacity in capacities
        if _INTERVAL_TO_SAVE * save_seconds(recipe, capacity_gib=capacity) <= interval_seconds
    )


def check_checkpoint_time(
    recipe: JobConfig, *, capacity_gib: int, step_seconds: float | None
) -> Iterator[Finding]:
    """Compare the time of a save with the recipe's deadline and interval.

    Args:
        recipe: The recipe.
        capacity_gib: Size of the file system.
        step_seconds: Measured or expected time of a step; None where it isn't known.
    """
    seconds = save_seconds(recipe, capacity_gib=capacity_gib)
    size = model_size.state_bytes(recipe) / 1e9
    takes = f"{size:.1f} GB take {seconds / 60:.1f} min at {capacity_gib} GiB"
    deadline = recipe.checkpoint.deadline_seconds
    if seconds > deadline:
        fix = f"set checkpoint.deadline_seconds to {seconds * _INTERVAL_TO_SAVE:.0f}, or take more capacity"
        yield fail(_NAME, f"{takes}, above deadline_seconds={deadline:g}", fix)
    every = recipe.checkpoint.every_steps
    needed = _INTERVAL_TO_SAVE * seconds
    if step_seconds is None:
        yield ok(_NAME, f"{takes}; every_steps={every} keeps up from {needed / every:.2f} s a step")
        return
    interval = every * step_seconds
    if interval >= needed:
        yield ok(_NAME, f"{takes}, one is made every {interval / 60:.1f} min")
        return
    capacity = recommended_capacity_gib(recipe, interval_seconds=interval)
    fix = f"set storage.capacity_gib to {capacity}, or checkpoint.every_steps to {needed / step_seconds:.0f}"
    yield warn(_NAME, f"{takes}, but one is made every {interval / 60:.1f} min", fix)
