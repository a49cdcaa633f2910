"""Model check of the slots: any interleaving of ranks, copies, readers and kills.

Ranks train as on a GPU: a snapshot is queued after the optimizer step and written piece by piece; the next
optimizer step of the same rank waits for it; a rank is at most one step ahead of any other, since every step
has a collective of all. Files, marks and locks are the real ones.
"""

from __future__ import annotations

import os
import tempfile
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from training import environment, inventory, snapshot
from training.events import EventLog
from training.integrity import fingerprint
from training.layout import Layout, Place
from training.lineage import Ancestry
from training.slots import Mark, Slot
from training.snapshot import Snapshots

RANKS = 3
WORDS = 8
NOTES = torch.zeros(2, dtype=torch.float64)
rank_numbers = st.integers(0, RANKS - 1)


class StreamCopier:
    """A copy that a stream makes piece by piece, some time after it was queued."""

    def __init__(self, tensors: list[Tensor], layout: Layout, device: torch.device) -> None:
        self._tensor, self._layout = tensors[0], layout
        self._slot: Slot | None = None
        self._mark: Mark | None = None
        self._stage = 0

    def copy(self, slot: Slot, mark: Mark, notes: Tensor) -> None:
        assert self._slot is None, "the optimizer step before did not wait for the copy"
        self._slot, self._mark, self._stage = slot, mark, 0

    def advance(self) -> None:
        """Do the next of: begin mark, first half, second half, complete mark."""
        slot, mark = self._slot, self._mark
        if slot is None or mark is None:
            return
        words, view = torch.tensor(mark.words()), slot.view(self._layout.pieces[0])
        half = WORDS // 2
        if self._stage == 0:
            slot.write_begin(words)
            slot.fingerprints()[0] = fingerprint(self._tensor)
        elif self._stage == 1:
            view[:half] = self._tensor[:half]
        elif self._stage == 2:
            view[half:] = self._tensor[half:]
        else:
            slot.write_complete(words)
            self._slot = None
        self._stage += 1

    def fence(self) -> None:
        while self._slot is not None:
            self.advance()

    def is_done(self, *, wait: bool) -> bool:
        if wait:
            self.fence()
        return self._slot is None

    def load(self, slot: Slot) -> list[str]:
        self._tensor.copy_(slot.view(self._layout.pieces[0]))
        changed = fingerprint(self._tensor) != int(slot.fingerprints()[0])
        return ["model.a"] if changed else []


class Slots(RuleBasedStateMachine):
    """One run: ranks, the drains that all of them start at a step, one stranger who reads."""

    def __init__(self) -> None:
        super().__init__()
        self.directory = tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-model-")
        self.patches: list[Any] = [
            mock.patch.dict(os.environ, {environment.SHARED_MEMORY: self.directory.name}),
            mock.patch.object(snapshot, "Copier", StreamCopier),
        ]
        for patch in self.patches:
            patch.start()
        self.log = EventLog(Path(self.directory.name), role="rank", node="n")
        self.ancestry = Ancestry().branch(parent=0, step=0)
        self.drains: dict[int, tuple[Slot, int]] = {}
        self.base = 0
        self.start_ranks(0)

    def start_ranks(self, step: int) -> None:
        """Make the processes of all ranks; what was in flight in the old ones is torn."""
        self.tensors = [torch.full((WORDS,), float(step)) for _ in range(RANKS)]
        self.steps = [step] * RANKS
        self.ranks: list[Snapshots] = []
        for rank, tensor in enumerate(self.tensors):
            ring = Snapshots(count=4, ranks_per_node=1, device=torch.device("cpu"), events=self.log, node="n")
            place = Place(shard=rank, shards=RANKS)
            ring.prepare("run", {"model.a": tensor}, place)
            self.ranks.append(ring)

    def mark(self, step: int) -> Mark:
        assert self.ancestry.live is not None
        return Mark(lineage=self.ancestry.live.id, step=step, position=step)

    @rule(rank=rank_numbers)
    def train(self, rank: int) -> None:
        step = self.steps[rank] + 1
        if step > min(self.steps) + 1:
            return  # waits in a collective for the slowest
        ring = self.ranks[rank]
        ring.set_up()
        ring.before_optimizer_step()
        self.tensors[rank].fill_(step)
        self.steps[rank] = step
        assert ring.take(self.mark(step), NOTES), "a snapshot was skipped without need"

    @rule(steps=st.integers(1, 3), order=st.permutations(range(RANKS)))
    def train_together(self, steps: int, order: list[int]) -> None:
        for _ in range(steps):
            for rank in order:
                self.train(rank)

    @rule(rank=rank_numbers)
    def copy_on(self, rank: int) -> None:
        copier = self.ranks[rank]._copier
        assert isinstance(copier, StreamCopier)
        copier.advance()
        self.ranks[rank].open_to_readers()

    @precondition(lambda self: not self.drains and min(self.steps) == max(self.steps) > self.base)
    @rule()
    def save(self) -> None:
        """All ranks hold the snapshot of the same step, as they do for a checkpoint."""
        step = self.steps[0]
        for rank, ring in enumerate(self.ranks):
            path = ring.hold(self.mark(step), NOTES)
            assert path is not None
            self.drains[rank] = (Slot(path, ring.layout), step)

    @rule(rank=rank_numbers)
    def drain(self, rank: int) -> None:
        """A worker reads its slot to the end and lets it go."""
        if rank not in self.drains:
            return
        slot, step = self.drains[rank]
        self.ranks[rank].open_to_readers()
        if slot.mark() != self.mark(step):
            return  # the copy is still going on: the worker waits
        slot.pin()
        assert slot.view(slot.layout.pieces[0]).tolist() == [step] * WORDS
        slot.close()
        del self.drains[rank]
        self.ranks[rank].release(slot.path)

    @rule()
    def kill_all(self) -> None:
        """SIGKILL at any instant, then a restore."""
        for slot, _ in self.drains.values():
            slot.close()
        self.drains.clear()
        reached = min(self.steps)
        for ring in self.ranks:  # what the kernel does at the end of a process
            for slot in ring._slots:
                slot.close()
        self.start_ranks(0)
        sources = inventory.shard_sources([ring.inventory() for ring in self.ranks], self.ancestry)
        newest = inventory.newest_first(sources)
        restored = newest[0].step if newest else 0
        if reached > self.base + 1:
            assert restored >= reached - 1, f"lost more than a step: {reached} -> {restored}"
        self.go_on(restored)

    def go_on(self, step: int) -> None:
        if step:
            parent = next(m.lineage for m in self.ranks[0].inventory() if m.step == step)
            for rank, ring in enumerate(self.ranks):
                ring.load(Mark(lineage=parent, step=step, position=step))
                assert self.tensors[rank].tolist() == [step] * WORDS
            self.ancestry = self.ancestry.branch(parent=parent, step=step)
        else:
            self.ancestry = self.ancestry.branch(parent=0, step=0)
        for ring in self.ranks:
            ring.forget_dead(self.ancestry)
        self.steps, self.base = [step] * RANKS, step

    @invariant()
    def whole_slots_hold_what_their_mark_says(self) -> None:
        for ring in self.ranks:
            for slot in ring._slots:
                mark = slot.mark()
                if mark is not None and slot is not ring._writing:
                    assert slot.view(slot.layout.pieces[0]).tolist() == [mark.step] * WORDS

    def teardown(self) -> None:
        for ring in self.ranks:
            ring.close(sweep=True)
        self.log.close()
        for patch in self.patches:
            patch.stop()
        self.directory.cleanup()


Slots.TestCase.settings = settings(
    max_examples=50, stateful_step_count=50, deadline=None, suppress_health_check=list(HealthCheck)
)
TestSlots = Slots.TestCase
