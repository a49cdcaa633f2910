"""Token shards: samples by arithmetic, and one clear message for each kind of damage."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from tests.training.token_files import write_shards
from training.errors import ConfigError, RunError
from training.shards import INDEX_FILE, TokenStore


@pytest.fixture
def store_dir(tmp_path: Path) -> Path:
    return write_shards(tmp_path / "train", range(100), shard_tokens=32)


def change_index(store_dir: Path, **changes: Any) -> None:
    mapping = json.loads((store_dir / INDEX_FILE).read_text())
    (store_dir / INDEX_FILE).write_text(json.dumps({**mapping, **changes}))


@given(tokens=st.integers(0, 60), shard=st.integers(1, 70), length=st.integers(1, 20))
def test_samples_follow_the_formula(
    tmp_path_factory: pytest.TempPathFactory, tokens: int, shard: int, length: int
) -> None:
    """GIVEN any shard size THEN samples are slices of one stream, across shard edges too."""
    stream = np.arange(tokens)
    path = write_shards(tmp_path_factory.mktemp("data") / "train", range(tokens), shard_tokens=shard)
    store = TokenStore(path)
    expected = [stream[i : i + length + 1] for i in range(0, tokens - length, length)]
    assert store.sample_count(length) == len(expected)
    for index, sample in enumerate(expected):
        assert store.sample(index, length).tolist() == sample.tolist()


@pytest.mark.parametrize("index", [-1, 11])
def test_samples_outside_are_refused(store_dir: Path, index: int) -> None:
    with pytest.raises(IndexError):
        TokenStore(store_dir).sample(index, 9)


def test_large_vocabularies_keep_their_ids(tmp_path: Path) -> None:
    path = write_shards(tmp_path / "t", [128_255, 1, 70_000], shard_tokens=2, vocabulary_tokens=128_256)
    assert TokenStore(path).sample(0, 2).tolist() == [128_255, 1, 70_000]


def test_missing_directory(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"data\.path='.*none': holds no readable index\.json .*prepare"):
        TokenStore(tmp_path / "none")


def test_message_names_the_setting(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"^data\.validation_path="):
        TokenStore(tmp_path / "none", setting="data.validation_path")


def test_other_version(store_dir: Path) -> None:
    change_index(store_dir, version=7)
    with pytest.raises(ConfigError, match=r"has version 7, this program reads 1; .*--force"):
        TokenStore(store_dir)


def test_torn_index(store_dir: Path) -> None:
    file = store_dir / INDEX_FILE
    file.write_bytes(file.read_bytes()[:50])
    with pytest.raises(RunError, match="is not JSON"):
        TokenStore(store_dir)


@pytest.mark.parametrize(
    "changes", [{"dtype": "int8"}, {"tokens": 99}, {"shards": [{"file": "x"}]}, {"unknown": 1}]
)
def test_damaged_index(store_dir: Path, changes: dict[str, Any]) -> None:
    change_index(store_dir, **changes)
    with pytest.raises(RunError, match=r"index\.json: is damaged"):
        TokenStore(store_dir)


def test_truncated_shard(store_dir: Path) -> None:
    os.truncate(store_dir / "00001.bin", 63)
    with pytest.raises(RunError, match=r"00001\.bin: 63 bytes, expected 64 bytes; copy the shards again"):
        TokenStore(store_dir)


def test_missing_shard(store_dir: Path) -> None:
    (store_dir / "00002.bin").unlink()
    with pytest.raises(RunError, match=r"00002\.bin: no file, expected 64 bytes"):
        TokenStore(store_dir)


def test_verify_finds_a_flipped_bit(store_dir: Path) -> None:
    store = TokenStore(store_dir)
    store.verify()
    data = bytearray((store_dir / "00000.bin").read_bytes())
    data[5] ^= 1
    (store_dir / "00000.bin").write_bytes(data)
    with pytest.raises(RunError, match=r"00000\.bin: xxh3-128 .*, expected "):
        store.verify()
