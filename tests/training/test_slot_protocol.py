"""Model check of the slots: any interleaving of ranks, copies, readers and kills.

Ranks train as on a GPU: the host queues steps and snapshots, at most one step ahead of the all-reduces that
are over; the device writes a snapshot piece by piece after its optimizer step and before the next, and is at
most one step ahead of any other, since every step has a collective of all. Files, marks and locks are real.
A second machine has slots that can be used one after the other, as a GPU's while their pages are locked.
"""

from __future__ import annotations

import os
import tempfile
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from hypothesis import HealthCheck, settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, precondition, rule
from torch import Tensor

from training import environment, inventory, slots, snapshot
from training.events import EventLog
from training.integrity import fingerprint
from training.layout import Layout, Place
from training.lineage import Ancestry
from training.slots import Mark, Slot
from training.snapshot import Snapshots

RANKS = 3
WORDS = 8
NOTES = torch.zeros(slots.NOTES, dtype=torch.float64)
rank_numbers = st.integers(0, RANKS - 1)


@dataclass(frozen=True, slots=True)
class Operation:
    """What a host has queued on its device."""

    run: Callable[[], None]
    step: int = 0
    """Of an optimizer step, which needs all ranks' gradients."""


class QueuedCopy:
    """The end of a copy."""

    def __init__(self, queue: deque[Operation]) -> None:
        self._queue, self._is_done = queue, False

    def finish(self) -> None:
        self._is_done = True

    def query(self) -> bool:
        return self._is_done

    def synchronize(self) -> None:
        while not self._is_done:
            self._queue.popleft().run()


class StreamCopier:
    """Copies that a device makes piece by piece, some time after they were queued."""

    def __init__(self, tensors: list[Tensor], layout: Layout, device: torch.device) -> None:
        self._tensor, self._layout = tensors[0], layout
        self.queue: deque[Operation] = deque()

    def copy(self, slot: Slot, mark: Mark, notes: Tensor) -> QueuedCopy:
        copied = QueuedCopy(self.queue)
        words, view, half = torch.tensor(mark.words()), slot.view(self._layout.pieces[0]), WORDS // 2

        def begin() -> None:
            slot.write_begin(words)
            slot.fingerprints()[0] = fingerprint(self._tensor)

        def complete() -> None:
            slot.write_complete(words)
            copied.finish()

        stages = (
            begin,
            lambda: view[:half].copy_(self._tensor[:half]),
            lambda: view[half:].copy_(self._tensor[half:]),
            complete,
        )
        self.queue.extend(Operation(stage) for stage in stages)  # type: ignore[arg-type]
        return copied

    def fence(self) -> None:
        """Wait for nothing: what is queued later comes later."""

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
    """One run: ranks, and the drains that all of them start at a step."""

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
        self.steps = [step] * RANKS  # that the hosts have queued
        self.devices = [step] * RANKS  # that the devices have done
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
        if step > min(min(self.steps) + 1, min(self.devices) + 2):
            return  # waits for the loss of the step before, which needs all ranks
        ring = self.ranks[rank]
        ring.set_up()
        ring.before_optimizer_step()
        self.queue(rank).append(Operation(partial(self.optimize, rank, step), step))
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
            while any([self.work(rank) for rank in order]):
                pass

    @rule(order=st.permutations(range(RANKS)))
    def run_ahead(self, order: list[int]) -> None:
        """Queue a step on each device that does nothing yet."""
        for rank in order:
            self.train(rank)

    def queue(self, rank: int) -> deque[Operation]:
        copier = self.ranks[rank]._copier
        assert isinstance(copier, StreamCopier)
        return copier.queue

    def optimize(self, rank: int, step: int) -> None:
        self.tensors[rank].fill_(step)
        self.devices[rank] = step

    @rule(rank=rank_numbers, operations=st.integers(1, 6))
    def device(self, rank: int, operations: int) -> None:
        for _ in range(operations):
            self.work(rank)

    def work(self, rank: int) -> bool:
        """Do what is next on a device; return whether it could be done."""
        queue = self.queue(rank)
        if not queue or queue[0].step > min(min(self.steps), min(self.devices) + 1):
            return False
        queue.popleft().run()
        return True

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
        reached = [step for step in self.taken if step <= min(self.devices)]
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
        self.steps, self.devices = [step] * RANKS, [step] * RANKS
        self.taken = [step] if step else []
        self.base = self.common = step

    @invariant()
    def whole_slots_hold_what_their_mark_says(self) -> None:
        for ring in self.ranks:
            for slot in ring._slots:
                mark = slot.mark()
                if mark is not None and slot not in ring._writing:
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
