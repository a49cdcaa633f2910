"""Which samples training has consumed: one line a step and rank, written when the step is committed.

A line is written after the optimizer step and before its snapshot, so no state can be restored whose lines
are missing. Lines of states that the run has left stay in the files; `consumed` reads along the path of
lineages that survived, where every position of the data order must appear exactly once.
"""

from __future__ import annotations

import json
import os
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

from training.data import Batch
from training.errors import CheckpointError
from training.files import listing
from training.lineage import name_of, read_ancestry


@dataclass(frozen=True, kw_only=True, slots=True)
class Consumed:
    """What one rank fed into one optimizer step."""

    step: int
    position: int
    """Samples that the run had consumed before the step."""
    rank: int
    ids: tuple[int, ...]
    checksum: int
    """xxh3-64 of the tokens that went into the forward pass."""


class SampleLedger:
    """Appends this rank's lines; a new file for each lineage."""

    def __init__(self, run_dir: Path, *, lineage: str, rank: int) -> None:
        directory = run_dir / "samples" / lineage
        directory.mkdir(parents=True, exist_ok=True)
        self._rank = rank
        path = directory / f"{rank:05d}.jsonl"
        self._file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC, 0o644)

    def append(self, step: int, batch: Batch) -> None:
        """Record a step; one write call, so that a kill loses a whole line or nothing."""
        entry = Consumed(
            step=step,
            position=batch.position,
            rank=self._rank,
            ids=tuple(batch.sample_ids.tolist()),
            checksum=batch.checksum,
        )
        os.write(self._file, json.dumps(asdict(entry), separators=(",", ":")).encode() + b"\n")

    def close(self) -> None:
        os.close(self._file)


def consumed(run_dir: Path) -> list[Consumed]:
    """Return what the surviving line of a run has consumed, ordered by step and rank.

    Raises:
        CheckpointError: A line in the middle of a file is torn.
    """
    found: list[Consumed] = []
    for lineage, last_step in read_ancestry(run_dir).path():
        for path in listing(run_dir, f"samples/{name_of(lineage.id)}/*.jsonl"):
            found += [entry for entry in _read(path) if lineage.step < entry.step <= last_step]
    return sorted(found, key=lambda entry: (entry.step, entry.rank))


def _read(path: Path) -> Iterator[Consumed]:
    lines = path.read_bytes().split(b"\n")
    for number, line in enumerate(lines[:-1], start=1):  # what follows the last newline was torn by a kill
        try:
            raw = json.loads(line)
            yield Consumed(**{**raw, "ids": tuple(raw["ids"])})
        except (ValueError, TypeError, KeyError) as error:
            raise CheckpointError(f"{path}:{number}: cannot be read ({error})") from error
