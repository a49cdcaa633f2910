"""Batches: the same global order for every shape of the job, at any position, with a thread behind."""

from __future__ import annotations

import logging
import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import xxhash

from tests.training.token_files import write_shards
from training.data import BatchReader, TokenStore, ValidationReader
from training.errors import ConfigError

LENGTH = 4
BATCH = 8


@pytest.fixture
def store(tmp_path: Path) -> TokenStore:
    return TokenStore(write_shards(tmp_path / "train", range(203), shard_tokens=50))


def reader(store: TokenStore, **changes: Any) -> BatchReader:
    settings = {
        "sequence_length_tokens": LENGTH,
        "global_batch_samples": BATCH,
        "seed": 3,
        "rank": 0,
        "world_size": 1,
        "prefetch_batches": 2,
    }
    return BatchReader(store, **{**settings, **changes})


def rank_tokens(store: TokenStore, position: int, **shape: Any) -> torch.Tensor:
    with reader(store, **shape) as batches:
        return batches.at(position).tokens


@pytest.fixture
def batches(store: TokenStore) -> Iterator[BatchReader]:
    with reader(store) as opened:
        yield opened


def test_tokens_are_those_of_the_samples(store: TokenStore, batches: BatchReader) -> None:
    batch = batches.at(16)
    assert batch.position == 16
    assert batch.tokens.shape == (1, BATCH, LENGTH + 1)
    assert batch.tokens.dtype == torch.int64
    for row, sample in zip(batch.tokens[0], batch.sample_ids, strict=True):
        assert row.tolist() == store.sample(int(sample), LENGTH).tolist()


def test_checksum_is_of_the_tokens(batches: BatchReader) -> None:
    batch = batches.at(0)
    assert batch.checksum == xxhash.xxh3_64_intdigest(batch.tokens.numpy().tobytes())
    assert batch.checksum != batches.at(BATCH).checksum


@pytest.mark.parametrize(
    ("world_size", "accumulation_steps"), [(1, 1), (1, 4), (2, 1), (2, 2), (4, 1), (4, 2), (8, 1)]
)
def test_global_batch_is_the_same_for_every_shape(
    store: TokenStore, world_size: int, accumulation_steps: int
) -> None:
    """GIVEN any ranks and micro-batches THEN rank after rank holds the batch that one rank would."""
    whole = rank_tokens(store, 40).reshape(BATCH, -1)
    shape = {"world_size": world_size, "accumulation_steps": accumulation_steps}
    parts = [rank_tokens(store, 40, rank=rank, **shape) for rank in range(world_size)]
    assert all(part.shape[0] == accumulation_steps for part in parts)
    assert torch.equal(torch.cat([part.reshape(-1, LENGTH + 1) for part in parts]), whole)


def test_an_epoch_takes_every_sample_once(store: TokenStore) -> None:
    samples = store.sample_count(LENGTH)
    with reader(store, global_batch_samples=5) as batches:
        ids = np.concatenate([batches.at(position).sample_ids for position in range(0, samples, 5)])
    assert np.array_equal(np.sort(ids), np.arange(samples))


def test_any_jump_gives_what_a_fresh_reader_gives(store: TokenStore, batches: BatchReader) -> None:
    """GIVEN restores to any position, off the grid of steps too THEN no stale batch is returned."""
    for position in (0, 8, 16, 8, 0, 96, 3, 11, 8, 10**9, 0):
        expected = rank_tokens(store, position)
        batch = batches.at(position)
        assert batch.position == position
        assert torch.equal(batch.tokens, expected)


def test_holds_no_more_than_ahead_and_behind(batches: BatchReader) -> None:
    for position in (0, 8, 16, 24, 32, 40, 8, 1000):
        batches.at(position)
        assert len(batches._batches) <= 1 + 2 + 2


def test_lookback_is_not_read_again(store: TokenStore) -> None:
    """GIVEN the last step is done again THEN its batch comes from memory."""
    with reader(store, lookback_batches=1) as batches:
        first = batches.at(0)
        batches.at(BATCH)
        assert batches.at(0) is first
    with reader(store, lookback_batches=0) as batches:
        first = batches.at(0)
        batches.at(BATCH)
        assert batches.at(0) is not first


def test_reads_ahead(store: TokenStore) -> None:
    """GIVEN a batch was asked for THEN the next ones no longer need the files."""
    with reader(store) as batches:
        batches.at(0)
        ahead = [batches._batches[position].result() for position in (BATCH, 2 * BATCH)]
        assert [batches.at(BATCH), batches.at(2 * BATCH)] == ahead


def test_error_of_the_thread_is_raised_and_can_be_retried(store: TokenStore) -> None:
    """GIVEN a shard vanishes THEN `at` raises, and works again when the shard is back."""
    hidden = store.path / "hidden"
    for shard in sorted(store.path.glob("*.bin")):
        os.rename(shard, hidden.with_suffix(shard.suffix + shard.name))
    with reader(store) as batches:
        with pytest.raises(FileNotFoundError):
            batches.at(0)
        for file in store.path.glob("hidden*"):
            os.rename(file, store.path / file.name.removeprefix("hidden.bin"))
        assert torch.equal(batches.at(0).tokens, rank_tokens(store, 0))


def test_sample_longer_than_the_corpus(store: TokenStore) -> None:
    with pytest.raises(ConfigError, match=r"data\.sequence_length_tokens=500: .* hold 203 tokens"):
        reader(store, sequence_length_tokens=500)


def test_batch_that_does_not_divide(store: TokenStore) -> None:
    with pytest.raises(ConfigError, match=r"data\.global_batch_samples=8: must be a multiple .*= 6; use 12"):
        reader(store, world_size=3, accumulation_steps=2)


def validation(store: TokenStore, **changes: Any) -> ValidationReader:
    settings = {
        "sequence_length_tokens": LENGTH,
        "global_batch_samples": BATCH,
        "batches": 3,
        "rank": 0,
        "world_size": 1,
    }
    return ValidationReader(store, **{**settings, **changes})


def test_every_evaluation_sees_the_same_first_samples(store: TokenStore) -> None:
    reader = validation(store)
    for _ in range(2):
        ids = np.concatenate([batch.sample_ids for batch in reader])
        assert ids.tolist() == list(range(3 * BATCH))
    reader.close()


def test_validation_ranks_share_a_batch(store: TokenStore) -> None:
    readers = [validation(store, rank=rank, world_size=2, batches=1) for rank in range(2)]
    ids = [batch.sample_ids.tolist() for reader in readers for batch in reader]
    assert ids == [[0, 1, 2, 3], [4, 5, 6, 7]]
    for opened in readers:
        opened.close()


def test_short_validation_is_said(store: TokenStore, caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        reader = validation(store, batches=50)
    assert len(reader) == len(list(reader)) == 6
    assert "holds 6 whole batches" in caplog.text
    reader.close()


def test_validation_below_one_batch_is_refused(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "validation", range(20), shard_tokens=50)
    with pytest.raises(ConfigError, match=r"data\.validation_path='.*': holds fewer samples than"):
        validation(TokenStore(path, setting="data.validation_path"))


@pytest.mark.parametrize(
    ("module", "unwanted"),
    [("training.data", ["tokenizers", "pyarrow", "datasets"]), ("training.shards", ["torch"])],
)
def test_imports_stay_small(module: str, unwanted: list[str]) -> None:
    """Import time is restart time for a worker, and start time for each process of prepare."""
    code = f"import sys, {module}; print([name for name in {unwanted} if name in sys.modules])"
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert result.stdout.strip() == "[]"
