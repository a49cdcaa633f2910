"""Which states of a run are still part of it.

Every restore begins a new lineage at the step that it restored, so a run is a path through lineages:

    a: 0 ... 40 ... 43      (fault; restored at 40)
            └─ b: 41 ... 60 (fault; restored at 60)
                        └─ c: 61 ...

A state is live if the path leads through it: here b's steps up to 60 are, a's up to 40, and a's 41 to 43
are not, wherever and whenever a copy of them turns up. `RUN_DIR/lineage.json` records the path; it is
written before the first optimizer step of a lineage, and says while a restore is going on, so that no
checkpoint is committed between the choice of a state and the record of it.
"""

from __future__ import annotations

import json
import secrets
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.errors import CheckpointError
from training.files import write_json


@dataclass(frozen=True, kw_only=True, slots=True)
class Lineage:
    """Steps done without a restore between them."""

    id: int
    """63 random bits, never 0: a mark in a slot is numbers only."""
    parent: int = 0
    """Lineage that it goes on from; 0 for a first start."""
    step: int = 0
    """Step of the parent's that it was restored at."""

    @property
    def name(self) -> str:
        return name_of(self.id)


@dataclass(frozen=True, kw_only=True, slots=True)
class Ancestry:
    """All lineages of a run, in order of their birth; the last one is live."""

    lineages: tuple[Lineage, ...] = ()
    restoring: str = ""
    """Id of the restore that is going on; empty while training."""

    @property
    def live(self) -> Lineage | None:
        return self.lineages[-1] if self.lineages else None

    def path(self) -> Iterator[tuple[Lineage, float]]:
        """Yield the live lineage and its ancestors, each with its last live step."""
        known = {lineage.id: lineage for lineage in self.lineages}
        limit, current = float("inf"), self.live
        while current is not None:
            yield current, limit
            limit, current = min(limit, current.step), known.get(current.parent)

    def holds(self, lineage: int, step: int) -> bool:
        """Say whether a state of the run is live."""
        return any(found.id == lineage and step <= limit for found, limit in self.path())

    def has_left(self, lineage: str, step: int) -> bool:
        """Say whether a state was left for good.

        One of another run, copied here, was not, unless this run began at an older one of its lineage.

        Args:
            lineage: Name of its lineage.
            step: Its step.
        """
        path = list(self.path())
        limits = {found.name: limit for found, limit in path}
        for first, _ in path[-1:]:
            limits.setdefault(name_of(first.parent), first.step)
        if lineage in limits:
            return step > limits[lineage]
        return any(lineage == found.name for found in self.lineages)

    def knows(self, lineage: int) -> bool:
        return any(found.id == lineage for found in self.lineages)

    def branch(self, *, parent: int, step: int) -> Ancestry:
        """Return the ancestry with a new live lineage."""
        lineage = Lineage(id=secrets.randbits(62) + 1, parent=parent, step=step)
        return Ancestry(lineages=(*self.lineages, lineage))


def name_of(lineage: int) -> str:
    """Return a lineage's id as it stands in names of directories and in manifests."""
    return f"{lineage:016x}"


def read_ancestry(run_dir: Path) -> Ancestry:
    """Read the record; a run that never trained has an empty one.

    Raises:
        CheckpointError: It cannot be read.
    """
    path = run_dir / "lineage.json"
    try:
        return ancestry_from_json(json.loads(path.read_text()))
    except FileNotFoundError:
        return Ancestry()
    except (OSError, ValueError, TypeError, KeyError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def write_ancestry(run_dir: Path, ancestry: Ancestry) -> None:
    write_json(run_dir / "lineage.json", asdict(ancestry))


def ancestry_from_json(raw: Mapping[str, Any]) -> Ancestry:
    lineages = tuple(Lineage(**entry) for entry in raw["lineages"])
    return Ancestry(lineages=lineages, restoring=raw["restoring"])
