"""Whether the shared file system takes checkpoints as fast as the recipe makes them."""

from __future__ import annotations

from collections.abc import Iterator

from k8s import model_size
from k8s.findings import Finding, fail, ok, warn
from k8s.save_time import SAVE_MARGIN, recommended_capacity_gib, save_seconds
from training.config import JobConfig

_NAME = "checkpoint time"


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
        fix = f"set checkpoint.deadline_seconds to {seconds * SAVE_MARGIN:.0f}, or take more capacity"
        yield fail(_NAME, f"{takes}, above deadline_seconds={deadline:g}", fix)
    every = recipe.checkpoint.every_steps
    needed = SAVE_MARGIN * seconds
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
