"""Tokenise a corpus in parallel: each part becomes two files of tokens and a sidecar that vouches for them.

A part whose sidecar agrees with its files is not done again, so a killed run goes on where it was.
"""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.connection
import os
import threading
from collections import Counter
from collections.abc import Iterator
from concurrent.futures import ProcessPoolExecutor, as_completed
from concurrent.futures.process import BrokenProcessPool
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, BinaryIO

import numpy as np
import xxhash

from training.errors import RunError
from training.files import write_text
from training.preparation.corpus import Corpus, Document, Piece
from training.preparation.progress import Progress
from training.preparation.tokenizer import TokenizerInfo, falls_into, open_tokenizer, single_threaded
from training.shards import DTYPES, dtype_for, file_checksum

SPLITS = ("train", "validation")

_BATCH_CHARACTERS = 1 << 20
_EXAMPLES = 3


@dataclass(frozen=True, kw_only=True, slots=True)
class PartFile:
    """One split of a part."""

    tokens: int
    documents: int
    xxh3_128: str


@dataclass(frozen=True, kw_only=True, slots=True)
class PartResult:
    """What came of a part; the content of its sidecar."""

    splits: dict[str, PartFile]
    text_bytes: int
    skipped: dict[str, int]
    examples: tuple[str, ...]
    """Ids of a few documents that were skipped, those that were just empty left out."""

    @classmethod
    def read(cls, path: Path) -> PartResult | None:
        """Read a sidecar; None if there is none."""
        try:
            mapping = json.loads(path.read_bytes())
        except (OSError, ValueError):
            return None
        splits = {name: PartFile(**file) for name, file in mapping["splits"].items()}
        return cls(**{**mapping, "splits": splits, "examples": tuple(mapping["examples"])})


@dataclass(frozen=True, kw_only=True, slots=True)
class Tokenisation:
    """All that a process needs to tokenise any part."""

    corpus: Corpus
    tokenizer: TokenizerInfo
    validation_fraction: float
    directory: Path

    @property
    def dtype(self) -> str:
        return dtype_for(self.tokenizer.vocabulary_tokens)

    @property
    def itemsize(self) -> int:
        return DTYPES[self.dtype].itemsize

    def file(self, number: int, split: str) -> Path:
        return self.directory / f"{number:06d}.{split}.bin"

    def sidecar(self, number: int) -> Path:
        return self.directory / f"{number:06d}.json"


def tokenise(
    task: Tokenisation,
    parts: list[tuple[Piece, ...]],
    merged: dict[str, set[int]],
    *,
    workers: int,
    progress: Progress,
) -> list[PartResult]:
    """Make the files of every part, in as many processes as `workers`.

    Args:
        task: What to do.
        parts: The pieces of each part.
        merged: By split, the parts that are in shards already; their files are not needed.
        workers: Processes.
        progress: Shows how far it is.

    Raises:
        RunError: A source file cannot be read, or a process was killed.
    """
    task.directory.mkdir(parents=True, exist_ok=True)
    progress.start("tokenise", sum(piece.size for part in parts for piece in part))
    results: dict[int, PartResult] = {}
    context = multiprocessing.get_context("spawn")
    with ProcessPoolExecutor(workers, context, _start_process, (task,)) as pool:
        futures = {}
        for number, part in enumerate(parts):
            needed = tuple(split for split in SPLITS if number not in merged[split])
            futures[pool.submit(_ensure_part, number, part, needed)] = number
        try:
            for future in as_completed(futures):
                number = futures[future]
                results[number], fresh = future.result()
                progress.advance(sum(piece.size for piece in parts[number]), fresh=fresh)
        except BrokenProcessPool as error:
            fix = "run again with fewer --workers (finished parts are kept)"
            raise RunError(f"a process of prepare was killed, perhaps for lack of memory; {fix}") from error
        finally:
            pool.shutdown(wait=False, cancel_futures=True)
    progress.finish()
    return [results[number] for number in range(len(parts))]


_task: Tokenisation
_tokenizer: Any


def _start_process(task: Tokenisation) -> None:
    global _task, _tokenizer
    single_threaded()
    threading.Thread(target=_end_with_parent, daemon=True).start()
    _task, _tokenizer = task, open_tokenizer(task.tokenizer)


def _end_with_parent() -> None:
    # Workers of a pool hold both ends of its pipes, so they would outlive a killed parent for ever.
    parent = multiprocessing.parent_process()
    assert parent is not None
    multiprocessing.connection.wait([parent.sentinel])
    os._exit(1)


def _ensure_part(number: int, pieces: tuple[Piece, ...], needed: tuple[str, ...]) -> tuple[PartResult, bool]:
    """Return the result of a part and whether it was made now."""
    known = PartResult.read(_task.sidecar(number))
    if known and all(_is_intact(_task.file(number, split), known.splits[split]) for split in needed):
        return known, False
    result = _make_part(number, pieces)
    write_text(_task.sidecar(number), json.dumps(asdict(result)))
    return result, True


def _is_intact(path: Path, expected: PartFile) -> bool:
    size = expected.tokens * _task.itemsize
    return path.is_file() and path.stat().st_size == size and file_checksum(path) == expected.xxh3_128


def _temporary(path: Path) -> Path:
    return path.with_name(f"{path.name}.{os.getpid()}.tmp")


class _SplitWriter:
    """Collects the token file of one split of a part."""

    def __init__(self, path: Path) -> None:
        self._path = path
        self._temporary = _temporary(path)
        self._file: BinaryIO = self._temporary.open("wb")
        self._digest = xxhash.xxh3_128()
        self._tokens = self._documents = 0

    def write(self, texts: list[str]) -> None:
        dtype = DTYPES[_task.dtype]
        eos = np.array([_task.tokenizer.eos_id], dtype=dtype)
        for ids in _tokenizer.encode(texts):
            data = np.concatenate([ids.astype(dtype), eos]).tobytes()
            self._file.write(data)
            self._digest.update(data)
            self._tokens += len(ids) + 1
        self._documents += len(texts)

    def close(self) -> PartFile:
        self._file.close()
        os.replace(self._temporary, self._path)
        return PartFile(tokens=self._tokens, documents=self._documents, xxh3_128=self._digest.hexdigest())


def _make_part(number: int, pieces: tuple[Piece, ...]) -> PartResult:
    writers = {split: _SplitWriter(_task.file(number, split)) for split in SPLITS}
    skipped: Counter[str] = Counter()
    examples: list[str] = []
    text_bytes = 0
    for batch in _batches(pieces):
        kept = [document for document in batch if not document.skip]
        for split, writer in writers.items():
            writer.write([document.text for document in kept if _split(document) == split])
        skipped.update(document.skip for document in batch if document.skip)
        examples += [document.id for document in batch if document.skip not in ("", "empty")]
        text_bytes += sum(len(document.text.encode()) for document in kept)
    return PartResult(
        splits={split: writer.close() for split, writer in writers.items()},
        text_bytes=text_bytes,
        skipped=dict(sorted(skipped.items())),
        examples=tuple(examples[:_EXAMPLES]),
    )


def _split(document: Document) -> str:
    return SPLITS[falls_into(document.id, _task.validation_fraction)]


def _batches(pieces: tuple[Piece, ...]) -> Iterator[list[Document]]:
    batch: list[Document] = []
    characters = 0
    for piece in pieces:
        for document in _task.corpus.documents(piece):
            batch.append(document)
            characters += len(document.text)
            if characters >= _BATCH_CHARACTERS:
                yield batch
                batch, characters = [], 0
    if batch:
        yield batch
