"""Finds the newest state that every rank can have, loads it, verifies it, and begins a new lineage.

The same for every fault and for a first start. All ranks decide alike, because each decides by a pure
function of what all have told (`training.inventory`); where one fails, all go on to the next source.
"""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Protocol

import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from training import commit, inventory, lineage
from training.errors import CheckpointError
from training.events import EventLog
from training.exchange import Exchange
from training.inventory import Source, Tier
from training.lineage import Ancestry
from training.slots import Mark, check_notes
from training.writers import load_rank_file

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Restored:
    """What a restore has led to."""

    lineage: int
    """The lineage that begins."""
    source: Source | None
    """None: there was no state, the run starts at step 0."""
    step: int = 0
    position: int = 0
    notes: tuple[float, ...] = ()
    """What the trainer noted beside the state; empty after a restore from a checkpoint."""


class ShardTier(Protocol):
    """A tier in which each rank has whole states of its own shard: `Snapshots`, `LocalCopies`."""

    def inventory(self) -> list[Mark]:
        """Return the states that this rank can have."""

    def load(self, mark: Mark) -> list[float]:
        """Load and verify one; return its notes.

        Raises:
            CheckpointError: It is damaged or gone.
        """

    def forget_dead(self, ancestry: Ancestry) -> None:
        """Let go of states that the run has left."""


class Restorer:
    """One restore, by all ranks together."""

    def __init__(
        self, run_dir: Path, *, exchange: Exchange, tiers: Mapping[Tier, ShardTier], events: EventLog
    ) -> None:
        self._run_dir, self._exchange = run_dir, exchange
        self._tiers, self._events = tiers, events
        self._leads = dist.get_rank() == 0
        self._phases: dict[str, float] = {}
        self._notes: tuple[float, ...] = ()

    @contextmanager
    def phase(self, name: str) -> Iterator[None]:
        """Add the time of a block to a phase of the restore."""
        start = time.time()
        try:
            yield
        finally:
            self._phases[name] = self._phases.get(name, 0.0) + time.time() - start

    def begin(self) -> Ancestry:
        """Keep writers from committing until `restore` has ended; return what is live."""
        ancestry = None
        if self._leads:
            ancestry = lineage.read_ancestry(self._run_dir)
            lineage.write_ancestry(self._run_dir, replace(ancestry, restoring=uuid.uuid4().hex))
        raw = self._exchange.first("lineage", asdict(ancestry) if ancestry else None)
        return lineage.ancestry_from_json(raw)

    def restore(
        self, tensors: Mapping[str, Tensor], ancestry: Ancestry, *, before: int | None = None
    ) -> Restored:
        """Load the newest state in place; the lineage that follows is recorded when this returns.

        Args:
            tensors: The state.
            ancestry: What is live.
            before: Step from which on states are bad.

        Raises:
            CheckpointError: Checkpoints exist, but none can be loaded.
        """
        with self.phase("inventory"):
            sources = [source for source in self._sources(ancestry) if before is None or source.step < before]
        source = self._load_newest(inventory.newest_first(sources), tensors)
        self._report_refused(sources, source)
        durable = [found for found in sources if found.tier == "durable"]
        if source is None and durable:
            raise CheckpointError(
                f"{self._run_dir}: holds {len(durable)} checkpoints and none can be used, see above; "
                "restore one from a copy, or start a new run directory"
            )
        with self.phase("lineage"):
            grown = self._branch(ancestry, source)
            for tier in self._tiers.values():
                tier.forget_dead(grown)
        return self._done(grown, source, tensors)

    def _sources(self, ancestry: Ancestry) -> list[Source]:
        sources: list[Source] = []
        for name, tier in self._tiers.items():
            told = self._exchange.gather(f"{name} inventory", [mark.words() for mark in tier.inventory()])
            inventories = [[_mark(words) for words in marks] for marks in told]
            sources += inventory.shard_sources(inventories, ancestry, tier=name)
        durable = inventory.durable_sources(self._run_dir / "checkpoints", ancestry) if self._leads else []
        listed = self._exchange.first("checkpoints", [_to_json(source) for source in durable])
        return sources + [_from_json(raw) for raw in listed]

    def _load_newest(self, candidates: Sequence[Source], tensors: Mapping[str, Tensor]) -> Source | None:
        for source in candidates:
            problem = self._load(source, tensors)
            if not problem:
                return source
            self._refuse(source, problem)
        return None

    def _load(self, source: Source, tensors: Mapping[str, Tensor]) -> str:
        """Load and verify; return the first problem that a rank has met."""
        self._notes = ()
        if source.path is None:
            with self.phase("load"):
                return self._agreed(source, self._load_shard(source))
        with self.phase("verify"):
            problem = self._agreed(source, _verify_share(source.path))
        if not problem:
            with self.phase("load"):
                _load_checkpoint(source.path, tensors)
        return problem

    def _load_shard(self, source: Source) -> str:
        assert source.mark is not None
        try:
            self._notes = tuple(self._tiers[source.tier].load(source.mark))
            check_notes(self._notes, source.mark)
        except CheckpointError as error:
            return str(error)
        return ""

    def _agreed(self, source: Source, problem: str) -> str:
        problems = self._exchange.gather(f"load {source}", problem)
        return next((f"rank {rank}: {found}" for rank, found in enumerate(problems) if found), "")

    def _report_refused(self, sources: Sequence[Source], chosen: Source | None) -> None:
        for source in sources:
            if source.refusal and (chosen is None or source.step >= chosen.step):
                self._refuse(source, source.refusal)

    def _refuse(self, source: Source, reason: str) -> None:
        if self._leads:
            self._events.emit(
                "refused", source=str(source), tier=source.tier, step=source.step, reason=reason
            )
            logger.warning("%s refused: %s", source, reason)

    def _branch(self, ancestry: Ancestry, source: Source | None) -> Ancestry:
        grown = None
        if self._leads:
            parent = int(source.lineage or "0", 16) if source else 0
            grown = ancestry.branch(parent=parent, step=source.step if source else 0)
            lineage.write_ancestry(self._run_dir, grown)
        raw = self._exchange.first("new lineage", asdict(grown) if grown else None)
        return lineage.ancestry_from_json(raw)

    def _done(self, ancestry: Ancestry, source: Source | None, tensors: Mapping[str, Tensor]) -> Restored:
        assert ancestry.live is not None
        if source is None:
            if ancestry.live is not ancestry.lineages[0] and self._leads:
                logger.warning("no earlier state of this run can be reached: starting again at step 0")
            return Restored(lineage=ancestry.live.id, source=None)
        mark = source.mark
        position = mark.position if mark is not None else int(tensors["position"])
        self._events.emit(
            "restored",
            step=source.step,
            source=source.tier,
            path=str(source.path or ""),
            lineage=ancestry.live.name,
            parent=source.lineage,
            phases={name: round(seconds, 4) for name, seconds in self._phases.items()},
        )
        return Restored(
            lineage=ancestry.live.id,
            source=source,
            step=source.step,
            position=position,
            notes=self._notes,
        )


def _verify_share(directory: Path) -> str:
    """Check this rank's share of a checkpoint's files."""
    try:
        commit.verify(directory, part=dist.get_rank(), parts=dist.get_world_size())
    except CheckpointError as error:
        return str(error)
    return ""


def _load_checkpoint(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    manifest = commit.read_manifest(directory)
    try:
        if manifest.format == "torch":
            load_rank_file(directory, tensors)
        else:
            dcp.load(dict(tensors), checkpoint_id=directory)
    except (RuntimeError, OSError, dcp.api.CheckpointException) as error:
        reason = " ".join(str(error).split())[:300]
        raise CheckpointError(f"{directory}: does not fit this model ({reason})") from error


def _mark(words: Sequence[int]) -> Mark:
    found, step, position = words
    return Mark(lineage=found, step=step, position=position)


def _to_json(source: Source) -> dict[str, str | int]:
    return {
        "step": source.step,
        "lineage": source.lineage,
        "path": str(source.path),
        "refusal": source.refusal,
    }


def _from_json(raw: Mapping[str, str | int]) -> Source:
    return Source(
        tier="durable",
        step=int(raw["step"]),
        lineage=str(raw["lineage"]),
        path=Path(str(raw["path"])),
        refusal=str(raw["refusal"]),
    )
