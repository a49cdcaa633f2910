"""Parts and shards: what is done is kept, what is damaged is done again."""

from __future__ import annotations

import io
import os
from pathlib import Path

import pytest

from training.preparation.corpus import open_folder
from training.preparation.merge import ShardMerger, merged_parts
from training.preparation.parts import SPLITS, PartResult, Tokenisation, tokenise
from training.preparation.progress import Progress
from training.preparation.tokenizer import TokenizerInfo

SHARD_TOKENS = 1 << 20
NOTHING: dict[str, set[int]] = {split: set() for split in SPLITS}


@pytest.fixture
def task(tmp_path: Path) -> Tokenisation:
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(24):
        (root / f"{number:02d}.txt").write_bytes(b"%07d " % number * (1 << 16))
    return Tokenisation(
        corpus=open_folder(root, text_field="text"),
        tokenizer=TokenizerInfo(name="byte", directory=None, vocabulary_tokens=257, eos_id=256, sha256=""),
        validation_fraction=0.3,
        directory=tmp_path / "parts",
    )


def run(task: Tokenisation, merged: dict[str, set[int]] = NOTHING) -> list[PartResult]:
    parts = task.corpus.parts()
    return tokenise(task, parts, merged, workers=2, progress=Progress(io.StringIO()))


def times(directory: Path, pattern: str = "*") -> dict[str, int]:
    return {path.name: path.stat().st_mtime_ns for path in directory.glob(pattern)}


def test_finished_parts_are_kept_and_damaged_ones_made_again(task: Tokenisation) -> None:
    """GIVEN three parts, one of them with a changed byte THEN exactly that one is written again."""
    results = run(task)
    assert len(results) == 3
    before = times(task.directory)
    data = bytearray(task.file(1, "train").read_bytes())
    data[7] ^= 1
    task.file(1, "train").write_bytes(data)
    assert run(task) == results
    after = times(task.directory)
    assert {name for name in after if after[name] != before[name]} == {
        "000001.json",
        "000001.train.bin",
        "000001.validation.bin",
    }


def merge(task: Tokenisation, results: list[PartResult], target: Path) -> dict[str, ShardMerger]:
    mergers = {split: ShardMerger(task, split, target / split, shard_tokens=SHARD_TOKENS) for split in SPLITS}
    for merger in mergers.values():
        merger.merge(results, Progress(io.StringIO()))
    return mergers


def shard_bytes(directory: Path) -> dict[str, bytes]:
    return {path.name: path.read_bytes() for path in directory.glob("*.bin")}


def test_shards_are_the_stream_in_equal_files(task: Tokenisation, tmp_path: Path) -> None:
    results = run(task)
    stream = {s: b"".join(task.file(n, s).read_bytes() for n in range(len(results))) for s in SPLITS}
    merge(task, results, tmp_path / "out")
    for split in SPLITS:
        shards = shard_bytes(tmp_path / "out" / split)
        assert b"".join(shards[name] for name in sorted(shards)) == stream[split]
        sizes = [len(shards[name]) for name in sorted(shards)]
        assert len(sizes) > 2
        assert set(sizes[:-1]) == {2 * SHARD_TOKENS}
        assert not any(task.file(number, split).exists() for number in range(len(results)))


def test_lost_shard_is_made_again_from_its_parts_alone(task: Tokenisation, tmp_path: Path) -> None:
    """GIVEN all parts are merged and deleted, and the third shard is damaged
    THEN the two shards before it stay, and only parts that reach beyond them are tokenised again.
    """
    results = run(task)
    mergers = merge(task, results, tmp_path / "out")
    expected = shard_bytes(tmp_path / "out" / "train")
    damaged = tmp_path / "out" / "train" / "00002.bin"
    os.truncate(damaged, 5)
    before = times(tmp_path / "out" / "train")
    merged = merged_parts(task, mergers, len(results))
    assert merged["validation"] == {0, 1, 2}
    ends = mergers["train"]._ends(results)
    assert merged["train"] == {n for n in range(3) if ends[n] <= 2 * SHARD_TOKENS} != {0, 1, 2}
    assert run(task, merged) == results
    mergers["train"].merge(results, Progress(io.StringIO()))
    assert shard_bytes(tmp_path / "out" / "train") == expected
    after = times(tmp_path / "out" / "train")
    assert [before[name] == after[name] for name in ("00000.bin", "00001.bin")] == [True, True]


def test_nothing_is_merged_without_all_sidecars(task: Tokenisation, tmp_path: Path) -> None:
    results = run(task)
    mergers = merge(task, results, tmp_path / "out")
    task.sidecar(1).unlink()
    assert merged_parts(task, mergers, len(results)) == NOTHING
