"""Model check of the slots: any interleaving of ranks, copies, readers and kills.

Ranks train as on a GPU: a snapshot is queued after the optimizer step and written piece by piece; the next
optimizer step of the same rank waits for it; a rank is at most one step ahead of any other, since every step
has a collective of all. Files, marks and locks are the real ones. A second machine has slots that can be used
one after the other, as a GPU's while their pages are being locked.
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


class Ring(Snapshots):
    """Slots of a rank, each of which can be used from the moment that it is in `usable`."""

    usable: set[Path] | None = None
    """None: all of them."""

    def _is_usable(self, slot: Slot) -> bool:
        return self.usable is None or slot.path in self.usable

    def lock_next(self) -> None:
        """Make the next slot usable, in the order of the real locks."""
        for slot in sorted(self._slots, key=lambda slot: self._contents[slot].step):
            if not self._is_usable(slot):
                assert self.usable is not None
                self.usable.add(slot.path)
                return


class Slots(RuleBasedStateMachine):
    """One run: ranks, the drains that all of them start at a step, one stranger who reads."""

    all_usable = True

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
        self.base = self.common = 0
        self.taken: list[int] = []
        """Steps whose snapshot all ranks take, and the one that was restored."""
        self.start_ranks(0)

    def start_ranks(self, step: int) -> None:
        """Make the processes of all ranks; what was in flight in the old ones is torn."""
        self.tensors = [torch.full((WORDS,), float(step)) for _ in range(RANKS)]
        self.steps = [step] * RANKS
        self.ranks: list[Ring] = []
        for rank, tensor in enumerate(self.tensors):
            ring = Ring(count=4, ranks_per_node=1, device=torch.device("cpu"), events=self.log, node="n")
            ring.usable = None if self.all_usable else set()
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
        if self.steps.count(step) == 1 and step == max(self.steps) and self.all_have_room():
            self.taken.append(step)
        if step in self.taken:
            assert ring.take(self.mark(step), NOTES), "a snapshot was skipped without need"

    def all_have_room(self) -> bool:
        """Decide for all, as the first rank comes to a step and nobody is further."""
        for ring in self.ranks:
            ring.set_up()
        return all(ring.has_room() for ring in self.ranks)

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
    @precondition(lambda self: all(ring.ready() for ring in self.ranks))
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
        reached = [step for step in self.taken if step <= min(self.steps)]
        for ring in self.ranks:  # what the kernel does at the end of a process
            for slot in ring._slots:
                slot.close()
        self.start_ranks(0)
        sources = inventory.shard_sources([ring.inventory() for ring in self.ranks], self.ancestry)
        newest = inventory.newest_first(sources)
        restored = newest[0].step if newest else 0
        if len(reached) > 1:
            assert restored >= reached[-2], f"lost more than one snapshot: {reached} -> {restored}"
        assert restored >= self.common
        self.go_on(restored)

    def go_on(self, step: int) -> None:
        if step:
            parent = next(m.lineage for m in self.ranks[0].inventory() if m.step == step)
            for rank, ring in enumerate(self.ranks):
                ring.load(Mark(lineage=parent, step=step, position=step))
                assert self.tensors[rank].tolist() == [step] * WORDS
                if ring.usable is not None:
                    [loaded] = [slot for slot in ring._slots if ring._contents[slot].step == step]
                    ring.usable.add(loaded.path)
            self.ancestry = self.ancestry.branch(parent=parent, step=step)
        else:
            self.ancestry = self.ancestry.branch(parent=0, step=0)
        for ring in self.ranks:
            ring.forget_dead(self.ancestry)
        self.steps, self.taken = [step] * RANKS, [step] if step else []
        self.base = self.common = step

    @invariant()
    def whole_slots_hold_what_their_mark_says(self) -> None:
        for ring in self.ranks:
            for slot in ring._slots:
                mark = slot.mark()
                if mark is not None and slot is not ring._writing:
                    assert slot.view(slot.layout.pieces[0]).tolist() == [mark.step] * WORDS

    @invariant()
    def newest_common_step_never_goes_back(self) -> None:
        held = [{slot.mark() for slot in ring._slots} - {None} for ring in self.ranks]
        common = max((mark.step for mark in set.intersection(*held) if mark is not None), default=0)
        assert common >= self.common, f"{self.common} was whole on all ranks, now it is {common}"
        self.common = common

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


class SlotsThatAreLockedSlowly(Slots):
    """The same run on GPUs: at first no slot can be used, after a restore the one that was loaded."""

    all_usable = False

    @rule(rank=rank_numbers)
    def lock(self, rank: int) -> None:
        self.ranks[rank].set_up()
        self.ranks[rank].lock_next()


SlotsThatAreLockedSlowly.TestCase.settings = Slots.TestCase.settings
TestSlotsThatAreLockedSlowly = SlotsThatAreLockedSlowly.TestCase
