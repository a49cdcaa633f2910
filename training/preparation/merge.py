"""Cut the token files of all parts into equal shards.

A shard is a range of the stream of all parts, so each can be made by itself: a run that was killed keeps
the shards it has. A part is deleted as soon as the shards that hold it are there, so no more than one
shard exists twice on disk.
"""

from __future__ import annotations

import itertools
import json
import os
from collections.abc import Iterator
from dataclasses import asdict
from pathlib import Path

import xxhash

from training.preparation.parts import SPLITS, PartResult, Tokenisation
from training.preparation.progress import Progress
from training.shards import Shard, file_checksum

_COPY_BYTES = 1 << 24


class ShardMerger:
    """Makes the shards of one split from parts."""

    def __init__(self, task: Tokenisation, split: str, target: Path, *, shard_tokens: int) -> None:
        self._task = task
        self._split = split
        self._target = target
        self._shard_tokens = shard_tokens

    def finished(self) -> list[Shard]:
        """Return the intact shards that an earlier run left, up to the first gap."""
        shards: list[Shard] = []
        while (shard := self._read_sidecar(len(shards))) and self._is_intact(shard):
            shards.append(shard)
        return shards

    def merge(self, results: list[PartResult], progress: Progress) -> tuple[Shard, ...]:
        """Make the missing shards and delete the parts that they hold."""
        self._target.mkdir(parents=True, exist_ok=True)
        ends = self._ends(results)
        total = ends[-1]
        shards = self.finished()
        progress.start(f"write {self._split} shards", total)
        progress.advance(sum(shard.tokens for shard in shards), fresh=False)
        for number in range(len(shards), -(-total // self._shard_tokens)):
            stop = min((number + 1) * self._shard_tokens, total)
            shards.append(self._write(number, ends, stop))
            progress.advance(shards[-1].tokens)
            self._delete_parts(ends, stop)
        progress.finish()
        return tuple(shards)

    def merged(self, results: list[PartResult]) -> set[int]:
        """Return the parts that the finished shards hold to their last token."""
        done = sum(shard.tokens for shard in self.finished())
        return {number for number, end in enumerate(self._ends(results)) if end <= done}

    def _ends(self, results: list[PartResult]) -> list[int]:
        """Return where in the split's stream each part ends, in tokens."""
        return list(itertools.accumulate(result.splits[self._split].tokens for result in results))

    def _write(self, number: int, ends: list[int], stop: int) -> Shard:
        path = self._target / f"{number:05d}.bin"
        temporary = path.with_suffix(".tmp")
        digest = xxhash.xxh3_128()
        with temporary.open("wb") as file:
            for piece in self._read(ends, number * self._shard_tokens, stop):
                digest.update(piece)
                file.write(piece)
            file.flush()
            os.fsync(file.fileno())
        os.replace(temporary, path)
        tokens = stop - number * self._shard_tokens
        shard = Shard(file=path.name, tokens=tokens, xxh3_128=digest.hexdigest())
        self._sidecar(number).write_text(json.dumps(asdict(shard)))
        return shard

    def _read(self, ends: list[int], start: int, stop: int) -> Iterator[bytes]:
        size = self._task.itemsize
        for number, (begin, end) in enumerate(zip([0, *ends], ends, strict=False)):
            low, high = max(start, begin), min(stop, end)
            if low < high:
                path = self._task.file(number, self._split)
                yield from _file_range(path, (low - begin) * size, (high - begin) * size)

    def _delete_parts(self, ends: list[int], stop: int) -> None:
        for number, end in enumerate(ends):
            if end <= stop:
                self._task.file(number, self._split).unlink(missing_ok=True)

    def _sidecar(self, number: int) -> Path:
        return self._task.directory / f"shard-{self._split}-{number:05d}.json"

    def _read_sidecar(self, number: int) -> Shard | None:
        try:
            return Shard(**json.loads(self._sidecar(number).read_bytes()))
        except (OSError, ValueError):
            return None

    def _is_intact(self, shard: Shard) -> bool:
        path = self._target / shard.file
        return path.is_file() and file_checksum(path) == shard.xxh3_128


def merged_parts(task: Tokenisation, mergers: dict[str, ShardMerger], count: int) -> dict[str, set[int]]:
    """Return, by split, the parts that finished shards hold; their files may be gone."""
    results = [PartResult.read(task.sidecar(number)) for number in range(count)]
    known = [result for result in results if result is not None]
    if len(known) < count:
        return {split: set() for split in SPLITS}
    return {split: mergers[split].merged(known) for split in SPLITS}


def _file_range(path: Path, start: int, stop: int) -> Iterator[bytes]:
    with path.open("rb") as file:
        file.seek(start)
        for position in range(start, stop, _COPY_BYTES):
            yield file.read(min(_COPY_BYTES, stop - position))
