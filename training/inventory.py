"""What a run could be restored from, and in which order: pure functions of what all ranks report."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Literal

from training import commit
from training.errors import CheckpointError
from training.lineage import Ancestry, name_of
from training.slots import Mark

Tier = Literal["memory", "local", "durable"]
# of states of the same step the one that is loaded soonest
_QUICKEST_FIRST: tuple[Tier, ...] = ("memory", "local", "durable")


@dataclass(frozen=True, kw_only=True, slots=True)
class Source:
    """A whole state of the run."""

    tier: Tier
    step: int
    lineage: str
    """As in names; empty if it cannot be told."""
    mark: Mark | None = None
    path: Path | None = None
    refusal: str = ""
    """Why it is not used; empty if nothing is known against it."""

    def __str__(self) -> str:
        return str(self.path) if self.path else f"{self.tier}, step {self.step}"


def shard_sources(
    inventories: Sequence[Sequence[Mark]], ancestry: Ancestry, *, tier: Tier = "memory"
) -> list[Source]:
    """Return every state of which some rank holds its shard; refuse those that not all ranks can have.

    Args:
        inventories: Whole states of its own shard that each rank can reach in this tier.
        ancestry: What is live.
        tier: Where they lie.
    """
    held = sorted({mark for marks in inventories for mark in marks}, key=lambda mark: mark.step)
    return [
        Source(
            tier=tier,
            step=mark.step,
            lineage=name_of(mark.lineage),
            mark=mark,
            refusal=_shard_refusal(mark, inventories, ancestry, tier),
        )
        for mark in held
    ]


def durable_sources(root: Path, ancestry: Ancestry) -> list[Source]:
    """Return every committed checkpoint; refuse those of a state that the run has left."""
    return [_durable_source(path, ancestry) for path in commit.committed_checkpoints(root)]


def newest_first(sources: Iterable[Source]) -> list[Source]:
    """Return what may be used: newest step first, then what loads soonest."""
    return sorted((source for source in sources if not source.refusal), key=order)


def order(source: Source) -> tuple[int, int]:
    """Return the key that sorts sources as a restore tries them."""
    return -source.step, _QUICKEST_FIRST.index(source.tier)


def _shard_refusal(mark: Mark, inventories: Sequence[Sequence[Mark]], ancestry: Ancestry, tier: Tier) -> str:
    if not ancestry.holds(mark.lineage, mark.step):
        return f"the run has left lineage {name_of(mark.lineage)} before step {mark.step}"
    missing = [rank for rank, marks in enumerate(inventories) if mark not in marks]
    what = "snapshot" if tier == "memory" else "copy"
    return f"ranks {missing} have no whole {what} of it" if missing else ""


def _durable_source(path: Path, ancestry: Ancestry) -> Source:
    step = commit.step_of(path)
    try:
        lineage = commit.read_manifest(path).lineage
    except CheckpointError as error:
        return Source(tier="durable", step=step, lineage="", path=path, refusal=str(error))
    has_left = ancestry.has_left(lineage, step)
    refusal = f"the run has left lineage {lineage} before step {step}" if has_left else ""
    return Source(tier="durable", step=step, lineage=lineage, path=path, refusal=refusal)
