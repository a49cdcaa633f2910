"""Batches for a rank, cut from token shards; the place in the data is one integer.

`position` counts samples that training has consumed, over all epochs. The global batch at a position is
the same whatever the world size: samples position .. position + global_batch_samples - 1 of a stateless
shuffle. Rank r takes the r-th contiguous slice of it and splits that slice into micro-batches, so moving
a sample to another rank or micro-batch only changes the order in which gradients are summed.

A thread reads ahead. What it holds is a cache of the function above: a restore asks for another
position, and what does not belong to it is dropped.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from types import TracebackType
from typing import Self

import numpy as np
import torch
import xxhash
from numpy.typing import NDArray

from training.errors import ConfigError
from training.permutation import sample_ids
from training.shards import TokenStore

__all__ = ["Batch", "BatchReader", "TokenStore", "ValidationReader"]

logger = logging.getLogger(__name__)

_POLL_SECONDS = 1.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Batch:
    """A rank's share of one global batch."""

    position: int
    """Samples consumed before this batch."""
    sample_ids: NDArray[np.int64]
    """Ids of the rank's samples, in the order of `tokens`."""
    tokens: torch.Tensor
    """int64, [accumulation steps, samples a micro-batch, sequence length + 1]."""
    checksum: int
    """xxh3-64 of the bytes of `tokens`."""


class BatchReader:
    """Batches by position, read ahead by a thread."""

    def __init__(
        self,
        store: TokenStore,
        *,
        sequence_length_tokens: int,
        global_batch_samples: int,
        seed: int | None,
        rank: int,
        world_size: int,
        accumulation_steps: int = 1,
        prefetch_batches: int = 10,
        lookback_batches: int = 2,
        pin_memory: bool = False,
    ) -> None:
        """Check that batches can be cut; nothing is read before the first `at` or `prefetch`.

        Args:
            store: Shards to read.
            sequence_length_tokens: Tokens that a sample trains on.
            global_batch_samples: Samples a step, over all ranks and micro-batches.
            seed: Seed of the order; None for the shards' own order.
            rank: Data-parallel rank.
            world_size: Data-parallel ranks.
            accumulation_steps: Micro-batches a step.
            prefetch_batches: Batches read ahead of the one last asked for.
            lookback_batches: Batches kept behind it.
            pin_memory: Lock the tensors' pages, for asynchronous copies to a GPU.

        Raises:
            ConfigError: The shards hold no sample, or the batch does not divide.
        """
        self.samples = _checked_sample_count(store, sequence_length_tokens)
        _check_divides(global_batch_samples, world_size * accumulation_steps)
        self._store = store
        self._length = sequence_length_tokens
        self._stride = global_batch_samples
        self._seed = seed
        self._local = global_batch_samples // world_size
        self._rank = rank
        self._accumulation = accumulation_steps
        self._ahead, self._behind = prefetch_batches, lookback_batches
        self._pin = pin_memory
        self._batches: dict[int, Future[Batch]] = {}
        self._thread = ThreadPoolExecutor(1, "data", _thread_setup(pin_memory=pin_memory))

    def at(self, position: int) -> Batch:
        """Return the batch at `position` and read ahead from there.

        An error of the reading thread is raised here, for the position it belongs to; asking again
        reads again.
        """
        self.prefetch(position)
        future = self._batches[position]
        # A wait without end would keep NVRx's in-process layer from raising its exception here.
        while not wait([future], timeout=_POLL_SECONDS).done:
            pass
        if future.exception():
            del self._batches[position]
        return future.result()

    def prefetch(self, position: int) -> None:
        """Read the batch at `position` and those after it; drop all that are far from it."""
        for held in list(self._batches):
            steps_ahead, remainder = divmod(held - position, self._stride)
            if remainder or not -self._behind <= steps_ahead <= self._ahead:
                self._batches.pop(held).cancel()
        for wanted in range(position, position + (self._ahead + 1) * self._stride, self._stride):
            if wanted not in self._batches:
                self._batches[wanted] = self._thread.submit(self._read, wanted)

    def close(self) -> None:
        """Stop reading; a batch that is being read is waited for."""
        self._thread.shutdown(wait=True, cancel_futures=True)
        self._batches.clear()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def _read(self, position: int) -> Batch:
        ids = self._order(position + self._rank * self._local)
        tokens = np.empty((self._local, self._length + 1), dtype=np.int64)
        for row, sample in zip(tokens, ids, strict=True):
            row[:] = self._store.sample(int(sample), self._length)
        tensor = torch.from_numpy(tokens).view(self._accumulation, -1, self._length + 1)
        return Batch(
            position=position,
            sample_ids=ids,
            tokens=tensor.pin_memory() if self._pin else tensor,
            checksum=xxhash.xxh3_64_intdigest(tokens.data),
        )

    def _order(self, position: int) -> NDArray[np.int64]:
        if self._seed is None:
            return np.arange(position, position + self._local, dtype=np.int64) % self.samples
        return sample_ids(position, self._local, self.samples, seed=self._seed)


class ValidationReader:
    """The same first batches of the validation shards for every evaluation.

    They are read ahead before the first evaluation and again after each one. No training position moves.
    """

    def __init__(
        self,
        store: TokenStore,
        *,
        sequence_length_tokens: int,
        global_batch_samples: int,
        batches: int,
        rank: int,
        world_size: int,
        accumulation_steps: int = 1,
        prefetch_batches: int = 10,
        pin_memory: bool = False,
    ) -> None:
        """Start to read ahead.

        Args:
            batches: Global batches an evaluation; fewer, with a warning, where the shards hold fewer.

        Other arguments are those of `BatchReader`.

        Raises:
            ConfigError: The shards hold less than one global batch.
        """
        samples = _checked_sample_count(store, sequence_length_tokens)
        self._batches = _checked_batches(store, samples // global_batch_samples, batches)
        self._stride = global_batch_samples
        self._reader = BatchReader(
            store,
            sequence_length_tokens=sequence_length_tokens,
            global_batch_samples=global_batch_samples,
            seed=None,
            rank=rank,
            world_size=world_size,
            accumulation_steps=accumulation_steps,
            prefetch_batches=min(prefetch_batches, self._batches - 1),
            lookback_batches=0,
            pin_memory=pin_memory,
        )
        self._reader.prefetch(0)

    def __len__(self) -> int:
        return self._batches

    def __iter__(self) -> Iterator[Batch]:
        for number in range(self._batches):
            yield self._reader.at(number * self._stride)
        self._reader.prefetch(0)

    def close(self) -> None:
        """Stop reading."""
        self._reader.close()


def _checked_sample_count(store: TokenStore, sequence_length_tokens: int) -> int:
    samples = store.sample_count(sequence_length_tokens)
    if samples:
        return samples
    raise ConfigError.of(
        "data.sequence_length_tokens",
        sequence_length_tokens,
        f"the shards in {store.path} hold {store.tokens} tokens, fewer than one sample",
        "use shorter samples, or prepare more text",
    )


def _checked_batches(store: TokenStore, whole: int, wanted: int) -> int:
    if not whole:
        rule = "holds fewer samples than data.global_batch_samples, so no evaluation is possible"
        fix = "prepare with a larger prepare.validation_fraction, or set training.evaluate_every_steps = 0"
        raise ConfigError.of(store.setting, str(store.path), rule, fix)
    if whole < wanted:
        logger.warning(
            "%s holds %d whole batches: an evaluation takes these instead of %d, its loss is noisier",
            store.path,
            whole,
            wanted,
        )
    return min(whole, wanted)


def _check_divides(global_batch_samples: int, micro_batches: int) -> None:
    if global_batch_samples % micro_batches:
        rule = f"must be a multiple of ranks x gradient_accumulation_steps = {micro_batches}"
        fix = f"use {-(-global_batch_samples // micro_batches) * micro_batches}"
        raise ConfigError.of("data.global_batch_samples", global_batch_samples, rule, fix)


def _thread_setup(*, pin_memory: bool) -> Callable[[], None] | None:
    # A new thread has device 0: pinning there would make every rank open a context on the first GPU.
    return partial(torch.cuda.set_device, torch.cuda.current_device()) if pin_memory else None
