"""How long a SCRATCH_2 file system takes to write a run's whole state."""

from __future__ import annotations

import itertools

from k8s.model_size import state_bytes
from training.config import JobConfig

# SCRATCH_2 writes to its disks; unlike the network, they don't burst (FSx for Lustre, "Performance")
_WRITE_BYTES_PER_SECOND_AND_TIB = 100_000_000
SAVE_MARGIN = 1.5
"""Time that is planned for a save, over the time that the disks alone take."""


def save_seconds(recipe: JobConfig, *, capacity_gib: int) -> float:
    """Return how long the disks take to write one checkpoint."""
    return state_bytes(recipe) / (capacity_gib / 1024 * _WRITE_BYTES_PER_SECOND_AND_TIB)


def recommended_capacity_gib(recipe: JobConfig, *, interval_seconds: float) -> int:
    """Return the smallest capacity that keeps up with a checkpoint every `interval_seconds`."""
    capacities = itertools.chain([1200], itertools.count(2400, 2400))
    return next(
        capacity
        for capacity in capacities
        if SAVE_MARGIN * save_seconds(recipe, capacity_gib=capacity) <= interval_seconds
    )
