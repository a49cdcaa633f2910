"""Token shards on disk: the format, and a memory-mapped view of them.

A directory of shards is one long stream of tokens, each document followed by the end-of-document
token, cut into equal files (the last one may be shorter) and described by `index.json`. Sample i of
length T is tokens [i*T, i*T + T + 1): the last token of a sample is the first one of the next, so every
token but the first is predicted once. Nothing on disk depends on T.

Imports no torch: `training prepare` writes this format without it.
"""

from __future__ import annotations

import json
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from functools import lru_cache
from pathlib import Path
from typing import Any

import numpy as np
import xxhash
from numpy.typing import NDArray

from training.errors import ConfigError, RunError

INDEX_FILE = "index.json"
VERSION = 1
SHARD_TOKENS = 1 << 26
DTYPES: dict[str, np.dtype[np.unsignedinteger[Any]]] = {
    "uint16": np.dtype("<u2"),
    "uint32": np.dtype("<u4"),
}

_MAPPED_SHARDS = 256  # a map holds a file descriptor; corpora have thousands of shards
_READ_BYTES = 1 << 24
_PREPARE_AGAIN = "run `python -m training prepare` again"

Tokens = NDArray[np.unsignedinteger[Any]]


@dataclass(frozen=True, kw_only=True, slots=True)
class Shard:
    """One file of tokens."""

    file: str
    tokens: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardIndex:
    """What `index.json` says about a directory of shards."""

    version: int
    dtype: str
    vocabulary_tokens: int
    eos_id: int
    tokenizer: str
    tokenizer_sha256: str
    source: str
    documents: int
    tokens: int
    shard_tokens: int
    shards: tuple[Shard, ...]

    def to_json(self) -> str:
        return json.dumps(asdict(self), indent=1) + "\n"

    @classmethod
    def from_mapping(cls, mapping: dict[str, Any]) -> ShardIndex:
        shards = tuple(Shard(**shard) for shard in mapping["shards"])
        return cls(**{**mapping, "shards": shards})


def dtype_for(vocabulary_tokens: int) -> str:
    """Return the smallest type that holds every token id."""
    return "uint16" if vocabulary_tokens <= 1 << 16 else "uint32"


def file_checksum(path: Path) -> str:
    """Return the xxh3-128 of a file, read in pieces."""
    digest = xxhash.xxh3_128()
    with path.open("rb") as file:
        while piece := file.read(_READ_BYTES):
            digest.update(piece)
    return digest.hexdigest()


class TokenStore:
    """Samples of a directory of token shards."""

    def __init__(self, path: Path, *, setting: str = "data.path") -> None:
        """Read the index and compare the size of every shard with it.

        Args:
            path: Directory that holds `index.json`.
            setting: Recipe key that the path came from, for messages.

        Raises:
            ConfigError: There is no index, or it is of another version.
            RunError: The index cannot be parsed, or a shard is missing or has the wrong size.
        """
        self.path = path
        self.setting = setting
        self.index = _read_index(path, setting)
        self._dtype = DTYPES[self.index.dtype]
        self._map = lru_cache(maxsize=_MAPPED_SHARDS)(self._open)
        _raise_damage(self._wrong_sizes())

    def is_current(self) -> bool:
        """Say whether the index on disk is still the one that was opened.

        Raises:
            ConfigError: There is no index any more.
            RunError: It cannot be parsed.
        """
        return _read_index(self.path, self.setting) == self.index

    @property
    def tokens(self) -> int:
        return self.index.tokens

    @property
    def vocabulary_tokens(self) -> int:
        """Token ids are below this; a model needs at least this many embeddings."""
        return self.index.vocabulary_tokens

    @property
    def eos_id(self) -> int:
        return self.index.eos_id

    def sample_count(self, sequence_length_tokens: int) -> int:
        """Return the number of samples of that length."""
        return max(0, self.tokens - 1) // sequence_length_tokens

    def sample(self, index: int, sequence_length_tokens: int) -> Tokens:
        """Return the `sequence_length_tokens` + 1 tokens of a sample, in the type of the shards."""
        start = index * sequence_length_tokens
        if not 0 <= index < self.sample_count(sequence_length_tokens):
            raise IndexError(f"sample {index} of {self.sample_count(sequence_length_tokens)}")
        return self._read(start, start + sequence_length_tokens + 1)

    def verify(self) -> None:
        """Compare the checksum of every shard with the index: reads everything.

        Raises:
            RunError: A shard holds other bytes than were written.
        """
        _raise_damage(self._wrong_checksums())

    def _read(self, start: int, stop: int) -> Tokens:
        size = self.index.shard_tokens
        pieces = []
        for number in range(start // size, (stop - 1) // size + 1):
            base = number * size
            pieces.append(self._map(number)[max(start - base, 0) : stop - base])
        return pieces[0] if len(pieces) == 1 else np.concatenate(pieces)

    def _open(self, number: int) -> Tokens:
        return np.memmap(self.path / self.index.shards[number].file, dtype=self._dtype, mode="r")

    def _wrong_sizes(self) -> Iterator[str]:
        for shard in self.index.shards:
            file = self.path / shard.file
            expected = shard.tokens * self._dtype.itemsize
            found = f"{file.stat().st_size} bytes" if file.is_file() else "no file"
            if found != f"{expected} bytes":
                yield f"{file}: {found}, expected {expected} bytes"

    def _wrong_checksums(self) -> Iterator[str]:
        for shard in self.index.shards:
            found = file_checksum(self.path / shard.file)
            if found != shard.xxh3_128:
                yield f"{self.path / shard.file}: xxh3-128 {found}, expected {shard.xxh3_128}"


def _read_index(path: Path, setting: str) -> ShardIndex:
    file = path / INDEX_FILE
    try:
        mapping = json.loads(file.read_bytes())
    except OSError as error:
        rule = f"holds no readable {INDEX_FILE} ({error.strerror})"
        fix = "make the shards with `python -m training prepare RECIPE`, or change the path"
        raise ConfigError.of(setting, str(path), rule, fix) from error
    except ValueError as error:
        raise RunError(f"{file}: is not JSON ({error}); {_PREPARE_AGAIN} with --force") from error
    if not isinstance(mapping, dict) or mapping.get("version") != VERSION:
        found = mapping.get("version") if isinstance(mapping, dict) else None
        rule = f"{INDEX_FILE} has version {found!r}, this program reads {VERSION}"
        raise ConfigError.of(setting, str(path), rule, f"{_PREPARE_AGAIN} with --force")
    try:
        return _checked(ShardIndex.from_mapping(mapping))
    except (KeyError, TypeError, ValueError) as error:
        raise RunError(f"{file}: is damaged ({error!r}); {_PREPARE_AGAIN} with --force") from error


def _checked(index: ShardIndex) -> ShardIndex:
    if index.dtype not in DTYPES:
        raise ValueError(f"dtype {index.dtype!r} is none of {', '.join(DTYPES)}")
    sizes = [shard.tokens for shard in index.shards]
    if sum(sizes) != index.tokens or any(size != index.shard_tokens for size in sizes[:-1]):
        raise ValueError("the tokens of the shards do not add up")
    return index


def _raise_damage(damage: Iterator[str]) -> None:
    lines = list(damage)
    if lines:
        more = f"\n... and {len(lines) - 5} more" if len(lines) > 5 else ""
        raise RunError("\n".join(lines[:5]) + f"{more}; copy the shards again, or {_PREPARE_AGAIN}")
