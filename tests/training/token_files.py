"""Token shards for tests."""

from __future__ import annotations

from pathlib import Path

import numpy as np

from training.shards import DTYPES, INDEX_FILE, VERSION, Shard, ShardIndex, dtype_for, file_checksum


def write_shards(
    path: Path, tokens: list[int] | range, *, shard_tokens: int, vocabulary_tokens: int = 1000
) -> Path:
    """Write `tokens` as shards and return their directory."""
    path.mkdir(parents=True)
    dtype = dtype_for(vocabulary_tokens)
    array = np.array(tokens, dtype=DTYPES[dtype])
    shards = []
    for number, start in enumerate(range(0, len(array), shard_tokens)):
        file = path / f"{number:05d}.bin"
        piece = array[start : start + shard_tokens]
        piece.tofile(file)
        shards.append(Shard(file=file.name, tokens=len(piece), xxh3_128=file_checksum(file)))
    index = ShardIndex(
        version=VERSION,
        dtype=dtype,
        vocabulary_tokens=vocabulary_tokens,
        eos_id=0,
        tokenizer="test",
        tokenizer_sha256="",
        source="test",
        documents=1,
        tokens=len(array),
        shard_tokens=shard_tokens,
        shards=tuple(shards),
    )
    (path / INDEX_FILE).write_text(index.to_json())
    return path
