"""A stateless shuffle: the order of an epoch is a function, so no index array or loader state exists.

Checkpoints name a place in this order by one integer. Changing anything here changes the data order of
every run that resumes; tests/training/test_permutation.py pins it.
"""

from __future__ import annotations

import hashlib

import numpy as np
from numpy.typing import NDArray

_ROUNDS = 4


def permute(positions: NDArray[np.int64], count: int, *, seed: int, epoch: int = 0) -> NDArray[np.int64]:
    """Map positions of range(count) one to one onto range(count).

    A Feistel network permutes the next larger even power of two; values outside the range walk on along
    their cycle until they are inside (at most 4 passes on average).
    """
    half = max(1, ((count - 1).bit_length() + 1) // 2)
    keys = _round_keys(seed, epoch)
    values = positions.astype(np.uint64)
    outside = np.ones(values.shape, dtype=bool)
    while outside.any():
        values[outside] = _feistel(values[outside], half, keys)
        outside = values >= np.uint64(count)
    return values.astype(np.int64)


def sample_ids(position: int, count: int, samples: int, *, seed: int) -> NDArray[np.int64]:
    """Return the sample ids at `position` and the `count` - 1 positions after it.

    Args:
        position: Samples that were consumed before, over all epochs.
        count: Samples wanted; they may cross the end of an epoch.
        samples: Samples in the data.
        seed: Seed of the order.
    """
    epochs, offsets = np.divmod(np.arange(position, position + count, dtype=np.int64), samples)
    ids = np.empty(count, dtype=np.int64)
    for epoch in np.unique(epochs):
        chosen = epochs == epoch
        ids[chosen] = permute(offsets[chosen], samples, seed=seed, epoch=int(epoch))
    return ids


def _feistel(values: NDArray[np.uint64], half: int, keys: NDArray[np.uint64]) -> NDArray[np.uint64]:
    shift, mask = np.uint64(half), np.uint64((1 << half) - 1)
    left, right = values >> shift, values & mask
    for key in keys:
        left, right = right, left ^ (_mix(right ^ key) & mask)
    return (left << shift) | right


def _mix(values: NDArray[np.uint64]) -> NDArray[np.uint64]:
    values = values * np.uint64(0x9E3779B97F4A7C15)
    values ^= values >> np.uint64(32)
    values *= np.uint64(0xD6E8FEB86659FD93)
    values ^= values >> np.uint64(29)
    return values


def _round_keys(seed: int, epoch: int) -> NDArray[np.uint64]:
    digest = hashlib.blake2b(f"{seed}/{epoch}".encode(), digest_size=8 * _ROUNDS).digest()
    return np.frombuffer(digest, dtype="<u8")
