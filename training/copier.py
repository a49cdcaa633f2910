"""Copies between a rank's tensors and a slot, with marks and fingerprints, in the order of one stream."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Protocol

import torch
from torch import Tensor

from training.integrity import fingerprinter
from training.layout import Layout
from training.page_locks import spans
from training.slots import Mark, Slot


class Copied(Protocol):
    """The end of a copy, as a CUDA event tells it."""

    def query(self) -> bool:
        """Say whether the copy is done."""
        ...

    def synchronize(self) -> None:
        """Wait until it is."""
        ...


@dataclass(frozen=True, kw_only=True, slots=True)
class _Part:
    """As much of a tensor as lies within one unit of page locks."""

    tensor: Tensor
    """Flat; shares the storage."""
    offset: int
    """In the slot."""


class Copier:
    """Copies one set of tensors; where they lie must not change."""

    def __init__(self, tensors: Sequence[Tensor], layout: Layout, device: torch.device) -> None:
        self._layout, self._device = layout, device
        self._fingerprint = fingerprinter(tensors, device)
        self._parts = list(_parts(tensors, layout))
        self._views: dict[Slot, list[Tensor]] = {}
        self._stream = torch.cuda.Stream(device) if device.type == "cuda" else None
        self._copied: torch.cuda.Event | None = None
        self._fenced = True
        # pairs of (host or stream ready for the next optimizer step, copy done), see `costs_seconds`
        self._timings: list[tuple[torch.cuda.Event, torch.cuda.Event]] = []
        self._costs_seconds: list[float] = []
        if self._stream is not None:
            self._fingerprint()  # compiles the kernel, which took 0.2 s of the first snapshot

    def copy(self, slot: Slot, mark: Mark, notes: Tensor) -> Copied | None:
        """Fill a slot; on a GPU this only queues the copy, behind all work queued so far.

        Returns:
            Its end, None if it is over.
        """
        if self._stream is None:
            start = time.perf_counter()
            self._fill(slot, torch.tensor(mark.words()), notes)
            self._costs_seconds.append(time.perf_counter() - start)
            return None
        words = torch.tensor(mark.words(), pin_memory=True)
        self._stream.wait_stream(torch.cuda.current_stream())
        with torch.cuda.stream(self._stream):
            self._fill(slot, words.to(self._device, non_blocking=True), notes)
            notes.record_stream(self._stream)
            copied = torch.cuda.Event(enable_timing=True)
            copied.record(self._stream)
        self._copied, self._fenced = copied, False
        return copied

    def fence(self) -> None:
        """Order what is queued from here on behind the last copy, without waiting on the host."""
        if self._copied is None or self._fenced:
            return
        reached = torch.cuda.Event(enable_timing=True)
        reached.record()
        torch.cuda.current_stream().wait_event(self._copied)
        self._timings.append((reached, self._copied))
        self._fenced = True

    def load(self, slot: Slot) -> list[str]:
        """Copy a slot back and return the names of tensors that are not what was copied once."""
        for part, view in zip(self._parts, self._views_of(slot), strict=True):
            part.tensor.copy_(view, non_blocking=True)
        actual = self._fingerprint().cpu()
        changed = (actual != slot.fingerprints()).nonzero().flatten().tolist()
        return [self._layout.pieces[index].name for index in changed]

    def costs_seconds(self) -> list[float]:
        """Return, once, how long training waited for each copy that is known to be over."""
        while self._timings and self._timings[0][0].query() and self._timings[0][1].query():
            reached, copied = self._timings.pop(0)
            self._costs_seconds.append(max(0.0, reached.elapsed_time(copied) / 1e3))
        costs, self._costs_seconds = self._costs_seconds, []
        return costs

    def _fill(self, slot: Slot, words: Tensor, notes: Tensor) -> None:
        slot.write_begin(words)
        slot.notes().copy_(notes, non_blocking=True)
        slot.fingerprints().copy_(self._fingerprint(), non_blocking=True)
        for part, view in zip(self._parts, self._views_of(slot), strict=True):
            view.copy_(part.tensor, non_blocking=True)
        slot.write_complete(words)

    def _views_of(self, slot: Slot) -> list[Tensor]:
        if slot not in self._views:
            self._views[slot] = [
                slot.part(part.offset, part.tensor.nbytes, part.tensor.dtype) for part in self._parts
            ]
        return self._views[slot]


def _parts(tensors: Sequence[Tensor], layout: Layout) -> Iterator[_Part]:
    for tensor, piece in zip(tensors, layout.pieces, strict=True):
        flat, start = tensor.view(-1), 0
        for offset, size_bytes in spans(piece.offset, piece.size_bytes):
            end = start + size_bytes // piece.dtype.itemsize
            yield _Part(tensor=flat[start:end], offset=offset)
            start = end
