"""Tier 0: copies of a rank's whole training state in shared host memory, taken while it trains.

The copy of step k runs on a side stream under the forward and backward of step k+1; only the next
optimizer step waits for it, and it waits on the GPU. On a CPU the copy is made at once.

Slots roll: a snapshot goes into the oldest one that nobody reads. The two newest are never overwritten:
ranks are at most one step apart, so whatever a kill leaves torn or missing on one rank, all ranks hold
the newest or the second newest in common. A drain holds one slot more, hence four.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator, Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from pathlib import Path

import torch
from torch import Tensor

from training import slot_owners, slots
from training.copier import Copied, Copier
from training.errors import CheckpointError, RunError
from training.events import EventLog
from training.layout import Layout, Place, local_tensors, make_layout
from training.lineage import Ancestry
from training.slot_owners import Owner
from training.slots import EMPTY, Mark, Slot

logger = logging.getLogger(__name__)

_PROTECTED = 2
# of a step, for locking pages: the host is ahead of the device by about as much
_LOCK_SHARE = 0.5


class Snapshots:
    """The slots of one rank. Made once a process, kept over in-process restarts."""

    def __init__(
        self, *, count: int, ranks_per_node: int, device: torch.device, events: EventLog, node: str
    ) -> None:
        self._count, self._ranks_per_node = count, ranks_per_node
        self._device, self._events, self._node = device, events, node
        self._run = ""
        self._layout: Layout | None = None
        self._owner: Owner | None = None
        self._slots: list[Slot] = []
        self._contents: dict[Slot, Mark] = {}
        # the host is ahead of the device: the copy of a step may not have begun when the next is queued
        self._writing: dict[Slot, Copied] = {}
        self._held: Slot | None = None
        self._copier: Copier | None = None
        self._setup: Future[None] | None = None
        self._set_up_at = math.inf
        self._is_ready = False
        self.skipped = 0

    @property
    def layout(self) -> Layout:
        assert self._layout is not None
        return self._layout

    @property
    def directory(self) -> Path:
        return slots.shard_directory(self._run, self._node, self.layout.place)

    def prepare(self, run: str, tensors: Mapping[str, Tensor], place: Place) -> None:
        """Find the slots that this or an earlier process has left. Allocates nothing yet.

        Args:
            run: Id of the run.
            tensors: The state; only its counters and shards are ever copied.
            place: Which shard this rank holds.

        Raises:
            RunError: The missing slots would not fit into memory.
        """
        self._finish_copies(wait=True)
        self._set_up_at = math.inf  # the time since then was no step
        local = _shards(tensors)
        layout = make_layout(local, place)
        if (run, layout) != (self._run, self._layout):
            self._release()
            self._run, self._layout = run, layout
            self._owner = Owner(self.directory)
            self._make_room()
            self._adopt_existing()
            missing = self._count - len(self._slots)
            slots.check_memory(
                needed_bytes=missing * layout.size_bytes, ranks=self._ranks_per_node, slots=self._count
            )
        self._copier = Copier([local[piece.name] for piece in layout.pieces], layout, self._device)

    def inventory(self) -> list[Mark]:
        """Return what this node holds of the rank's shard: whole snapshots of this run and layout."""
        marks = [slot.mark() for slot in self._slots]
        for slot in self._copies():
            marks.append(slot.mark())
            slot.close()
        return [mark for mark in marks if mark is not None]

    def load(self, mark: Mark) -> list[float]:
        """Copy a snapshot back into the state, and check every tensor where it then is.

        Returns:
            Its notes.

        Raises:
            CheckpointError: No whole slot holds it, or a tensor is not what was once copied.
        """
        slot = next((slot for slot in self._slots if slot.mark() == mark), None) or self._open_copy(mark)
        if slot is None:
            raise CheckpointError(f"{self.directory}: the snapshot of step {mark.step} is gone")
        try:
            if self._device.type == "cuda":
                slot.lock_pages()
            return self.read(slot)
        finally:
            if slot not in self._slots:
                slot.close()

    def read(self, slot: Slot) -> list[float]:
        """Copy any slot of this layout into the state, and check every tensor where it then is.

        Raises:
            CheckpointError: A tensor is not what was once copied.
        """
        assert self._copier is not None
        slot.pin()
        try:
            changed, notes = self._copier.load(slot), slot.notes().tolist()
        finally:
            slot.unlock()
        if changed:
            raise CheckpointError(f"{slot.path}: {changed[0]}: its fingerprint is not the recorded one")
        return list(notes)

    def forget_dead(self, ancestry: Ancestry) -> None:
        """Invalidate slots of states that are no longer part of the run."""
        for slot in self._slots:
            mark = slot.mark()
            if mark is None or not ancestry.holds(mark.lineage, mark.step):
                slot.invalidate()
            self._contents[slot] = slot.mark() or EMPTY
        slots.sweep_other_meshes(self.directory.parent, shards=self.layout.place.shards)

    @property
    def can_set_up_at_once(self) -> bool:
        """Whether set-up is quick enough for the way to the first step: there are no pages to lock."""
        return self._device.type != "cuda"

    def set_up(self) -> None:
        """Make what is missing; call it after every step, when the device has its work.

        On a GPU memory is allocated in a thread, and pages are locked a few at each call.
        """
        if self._setup is None:
            executor = ThreadPoolExecutor(1, "snapshot-setup")
            self._setup = executor.submit(self._allocate)
            executor.shutdown(wait=False)
            self._set_up_at = math.inf
        if self._device.type != "cuda":
            self._setup.result()
        elif self._setup.done() and not self._is_ready:
            self._lock_pages(seconds=_LOCK_SHARE * (time.perf_counter() - self._set_up_at))
        self._set_up_at = time.perf_counter()

    def has_room(self) -> bool:
        """Say whether a snapshot can be taken: from the first slot on, and always once all are there."""
        return self.ready() or bool(self._candidates())

    def ready(self) -> bool:
        """Say whether all slots are there.

        Raises:
            RunError: Set-up has failed.
        """
        if self._setup is not None and self._setup.done():
            self._setup.result()
            self._is_ready = all(self._is_usable(slot) for slot in self._slots)
        return self._is_ready

    def wait_ready(self) -> None:
        """Wait until all slots are there."""
        self.set_up()
        assert self._setup is not None
        self._setup.result()
        if not self.ready():
            self._lock_pages(seconds=math.inf)

    def take(self, mark: Mark, notes: Tensor) -> bool:
        """Copy the state; on a GPU this only queues the copy.

        Args:
            mark: What the state is.
            notes: `slots.NOTES` fp64 numbers on the device, such as the loss of the step.

        Returns:
            False if no slot is free.
        """
        assert self._copier is not None
        self.open_to_readers()
        slot = self._free_slot()
        if slot is None:
            self.skipped += 1
            self._events.emit("snapshot", step=mark.step, status="skipped", skipped=self.skipped)
            return False
        copied = self._copier.copy(slot, mark, notes)
        self._contents[slot] = mark
        if copied is None:
            slot.unlock()
        else:
            self._writing[slot] = copied
        return True

    def before_optimizer_step(self) -> None:
        """Let the GPU, not the host, wait until the last copy is done."""
        if self._copier is not None:
            self._copier.fence()
        self.open_to_readers()

    def open_to_readers(self) -> None:
        """Let readers into the slots whose copies are done."""
        self._finish_copies(wait=False)

    def newest_step(self) -> int:
        """Return the newest step that is held whole, as far as this rank knows; 0 if there is none."""
        whole = (mark.step for slot, mark in list(self._contents.items()) if slot not in self._writing)
        return max(whole, default=0)

    def hold(self, mark: Mark, notes: Tensor) -> Path | None:
        """Keep a step's snapshot until `release`, taking it if need be; None if no slot is free.

        One is held at a time.
        """
        if self._held is not None:
            return None
        slot = self._slot_of(mark)
        if slot is None:
            slot = self._slot_of(mark) if self.take(mark, notes) else None
        self._held = slot
        return slot.path if slot else None

    def release(self, path: Path) -> None:
        """Let go of the slot if it is the one that is held."""
        if self._held is not None and self._held.path == path:
            self._held = None

    def costs_seconds(self) -> list[float]:
        """Return, once, by how long each snapshot since the last call has held up training."""
        return self._copier.costs_seconds() if self._copier is not None else []

    def close(self, *, sweep: bool) -> None:
        """Let go of the slots.

        Args:
            sweep: Remove them: the run is over.
        """
        if self._layout is None:
            return
        directory = self.directory
        self._finish_copies(wait=True)
        self._release()
        if sweep:
            slots.sweep(directory)

    def _make_room(self) -> None:
        slot_owners.record_keeper(self.directory.parent)
        for path in slot_owners.sweep_dead_runs(slots.root(), but=self._run):
            logger.info("%s: removed; its run is dead", path)

    def _adopt_existing(self) -> None:
        wanted = slots.describe(self._run, self.layout)
        for path in (self._path(number) for number in range(self._count)):
            if slots.fits(path, self.layout, wanted):
                self._slots.append(Slot(path, self.layout))
            elif path.exists():
                reason = "is truncated, or a slot of another run or model"
                self._events.emit("refused", source=str(path), tier="memory", reason=reason)
        self._contents = {slot: slot.mark() or EMPTY for slot in self._slots}

    def _copies(self) -> Iterator[Slot]:
        """Yield, opened, the slots of HSDP copies of the rank's shard on this node."""
        own = {slot.path for slot in self._slots}
        wanted = slots.describe(self._run, self.layout)
        for path in slots.slots_of_shard(self._run, self._node, self.layout):
            if path not in own and slots.fits(path, self.layout, wanted):
                yield Slot(path, self.layout)

    def _open_copy(self, mark: Mark) -> Slot | None:
        for slot in self._copies():
            if slot.mark() == mark:
                return slot
            slot.close()
        return None

    def _allocate(self) -> None:
        descriptor = slots.describe(self._run, self.layout)
        own = {slot.path for slot in self._slots}
        for path in (self._path(number) for number in range(self._count)):
            if path not in own:
                slot = Slot.make(path, self.layout, descriptor)
                slot.invalidate()
                if self._device.type == "cuda":
                    slot.touch()
                self._contents[slot] = EMPTY
                self._slots.append(slot)

    def _lock_pages(self, *, seconds: float) -> None:
        deadline = time.perf_counter() + seconds
        # the oldest first: it takes the next snapshot, long before all are locked
        for slot in sorted(self._slots, key=lambda slot: self._contents[slot].step):
            while not slot.page_locks.are_complete:
                slot.page_locks.extend(seconds=deadline - time.perf_counter())
                if time.perf_counter() >= deadline:
                    return

    def _is_usable(self, slot: Slot) -> bool:
        return self._device.type != "cuda" or slot.page_locks.are_complete

    def _path(self, number: int) -> Path:
        return self.directory / f"{number}.slot"

    def _slot_of(self, mark: Mark) -> Slot | None:
        return next((slot for slot in self._slots if self._contents[slot] == mark), None)

    def _free_slot(self) -> Slot | None:
        return next((slot for slot in self._candidates() if slot.try_lock()), None)

    def _candidates(self) -> list[Slot]:
        """Return the slots that may be overwritten, the oldest first."""
        oldest_first = sorted(self._slots, key=lambda slot: self._contents[slot].step)
        free = oldest_first[:-_PROTECTED] if self._count > _PROTECTED else oldest_first
        taken = {self._held, *self._writing}
        return [slot for slot in free if slot not in taken and self._is_usable(slot)]

    def _finish_copies(self, *, wait: bool) -> None:
        for slot, copied in list(self._writing.items()):
            if wait:
                copied.synchronize()
            if copied.query():
                slot.unlock()
                del self._writing[slot]

    def _release(self) -> None:
        if self._setup is not None:
            self._setup.result()
            self._setup, self._is_ready = None, False
        self._copier = None
        for slot in self._slots:
            slot.close()
        self._slots, self._contents, self._held = [], {}, None
        if self._owner is not None:
            self._owner.release()
            self._owner = None


def _shards(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return what is copied: the counters are in the mark."""
    shards = {name: tensor for name, tensor in tensors.items() if name not in ("step", "position")}
    local = local_tensors(shards)
    scattered = [name for name, tensor in local.items() if not tensor.is_contiguous()]
    if scattered:
        raise RunError(f"{scattered[0]}: its shard is not contiguous; snapshots need that")
    return local
