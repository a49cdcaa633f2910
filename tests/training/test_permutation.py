"""The data order: bijective for any size, even, and pinned."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.permutation import permute, sample_ids


@given(count=st.integers(1, 3000), seed=st.integers(0, 2**63), epoch=st.integers(0, 9))
def test_is_a_bijection(count: int, seed: int, epoch: int) -> None:
    permuted = permute(np.arange(count), count, seed=seed, epoch=epoch)
    assert np.array_equal(np.sort(permuted), np.arange(count))


@pytest.mark.parametrize("count", [65_537, 1_000_003])
def test_is_a_bijection_of_large_awkward_sizes(count: int) -> None:
    permuted = permute(np.arange(count), count, seed=7)
    assert np.bincount(permuted, minlength=count).max() == 1


def test_order_never_changes() -> None:
    """GIVEN a checkpoint of an older release THEN its position still means the same samples."""
    assert permute(np.arange(10), 10, seed=0).tolist() == [4, 1, 0, 9, 2, 8, 6, 3, 5, 7]
    assert sample_ids(1_000_000, 4, 123_457, seed=42).tolist() == [83416, 105144, 97055, 4641]


def test_shuffles_evenly() -> None:
    chosen = permute(np.arange(100_000), 1_000_000, seed=5)
    counts = np.histogram(chosen, bins=100, range=(0, 1_000_000))[0]
    assert ((counts - 1000) ** 2 / 1000).sum() / 99 < 1.5
    neighbours = np.abs(np.diff(chosen)).mean() / 1_000_000
    assert neighbours == pytest.approx(1 / 3, abs=0.01)


def test_epochs_and_seeds_differ() -> None:
    positions = np.arange(1000)
    first = permute(positions, 1000, seed=1)
    assert (first != permute(positions, 1000, seed=1, epoch=1)).mean() > 0.9
    assert (first != permute(positions, 1000, seed=2)).mean() > 0.9


@given(samples=st.integers(1, 50), count=st.integers(1, 120), start=st.integers(0, 500))
def test_epoch_edges_inside_a_batch(samples: int, count: int, start: int) -> None:
    """GIVEN a batch that crosses epochs THEN it equals its samples asked for one at a time."""
    batch = sample_ids(start, count, samples, seed=3)
    singles = [sample_ids(start + offset, 1, samples, seed=3)[0] for offset in range(count)]
    assert batch.tolist() == singles


@given(samples=st.integers(1, 60), epochs=st.integers(1, 4))
def test_every_epoch_takes_every_sample_once(samples: int, epochs: int) -> None:
    ids = sample_ids(0, samples * epochs, samples, seed=11)
    assert np.bincount(ids).tolist() == [epochs] * samples


def test_positions_far_ahead_are_cheap_and_in_range() -> None:
    ids = sample_ids(10**15, 512, 10**9, seed=1)
    assert ids.min() >= 0
    assert ids.max() < 10**9
    assert len(np.unique(ids)) == 512
