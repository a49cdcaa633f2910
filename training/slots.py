"""Snapshot slots: files in shared memory that outlive the process that fills them.

    /dev/shm/holdfast/RUN/NODE/shard-00001-of-00004.0/
        owner                       locked by the process that writes the slots
        0.slot  1.slot  ...         each holds one whole snapshot, or is being written, or is empty

    slot = begin mark | notes | complete mark | descriptor | fingerprints | tensors

A mark is (lineage, step, position). The stream that copies the tensors also writes the marks, before and
after them, so a slot whose marks differ was torn by a kill. Whoever reads a slot of a live run holds a
shared lock on it (a pin); the writer locks it exclusively while it writes. The kernel drops both locks when
their process dies.
"""

from __future__ import annotations

import fcntl
import json
import logging
import math
import mmap
import os
import shutil
from collections.abc import Iterator, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Self

import torch
from torch import Tensor

from training import environment
from training.errors import CheckpointError, RunError
from training.files import listing
from training.layout import HEADER_BYTES, Layout, Piece, Place
from training.page_locks import PageLocks

logger = logging.getLogger(__name__)

_BEGIN, _NOTES, _COMPLETE = slice(0, 24), slice(32, 56), slice(64, 88)
_DESCRIPTOR = slice(128, HEADER_BYTES)
NOTES = 3  # see `training.metrics.StepMetrics.notes`


@dataclass(frozen=True, kw_only=True, slots=True)
class Mark:
    """What a slot holds."""

    lineage: int
    step: int
    position: int

    def words(self) -> list[int]:
        return [self.lineage, self.step, self.position]


EMPTY = Mark(lineage=0, step=0, position=0)


@dataclass(frozen=True, kw_only=True, slots=True)
class Descriptor:
    """Whose slot it is: a slot is only ever used where all of it matches."""

    version: int = 1
    run: str
    layout: str
    shard: int
    shards: int


def describe(run: str, layout: Layout) -> Descriptor:
    place = layout.place
    return Descriptor(run=run, layout=layout.digest, shard=place.shard, shards=place.shards)


class Slot:
    """One mapped slot file."""

    def __init__(self, path: Path, layout: Layout) -> None:
        """Map an existing file.

        Raises:
            OSError: It is not there.
        """
        self.path, self.layout = path, layout
        # The descriptor stays open: it carries the lock. Children must not inherit it.
        self._file = os.open(path, os.O_RDWR | os.O_CLOEXEC)
        self._map = mmap.mmap(self._file, layout.size_bytes)
        self.buffer = torch.frombuffer(self._map, dtype=torch.uint8)
        self.page_locks = PageLocks(self.buffer, str(path))

    @classmethod
    def make(cls, path: Path, layout: Layout, descriptor: Descriptor) -> Self:
        """Map the slot file, which is made, and really allocated, unless one that fits is there.

        Raises:
            RunError: Shared memory cannot hold it.
        """
        if not fits(path, layout, descriptor):
            path.unlink(missing_ok=True)
            _allocate(path, layout.size_bytes)
        slot = cls(path, layout)
        slot._write_descriptor(descriptor)
        return slot

    def begin_mark(self) -> Mark:
        return _mark(self.buffer[_BEGIN])

    def complete_mark(self) -> Mark:
        return _mark(self.buffer[_COMPLETE])

    def mark(self) -> Mark | None:
        """Return what the slot holds, None if it is empty or torn."""
        complete = self.complete_mark()
        return complete if complete == self.begin_mark() and complete.lineage else None

    def write_begin(self, words: Tensor) -> None:
        """Copy a mark (3 x int64, any device) in the order of the current stream."""
        self.buffer[_BEGIN].view(torch.int64).copy_(words, non_blocking=True)

    def write_complete(self, words: Tensor) -> None:
        self.buffer[_COMPLETE].view(torch.int64).copy_(words, non_blocking=True)

    def notes(self) -> Tensor:
        """Return the memory of `NOTES` fp64 numbers that the trainer keeps beside the state."""
        return self.buffer[_NOTES].view(torch.float64)

    def invalidate(self) -> None:
        """Forget the contents; no copy into the slot may be going on."""
        self.buffer[_COMPLETE].zero_()
        self.buffer[_BEGIN].zero_()

    def part(self, offset: int, size_bytes: int, dtype: torch.dtype) -> Tensor:
        """Return a range of the slot's memory, flat."""
        return self.buffer[offset : offset + size_bytes].view(dtype)

    def view(self, piece: Piece) -> Tensor:
        """Return the slot's memory of one tensor."""
        raw = self.buffer[piece.offset : piece.offset + piece.size_bytes]
        return raw.view(piece.dtype).view(piece.shape)

    def fingerprints(self) -> Tensor:
        """Return the memory of the tensors' fingerprints, one int64 a piece."""
        return self.buffer[HEADER_BYTES : HEADER_BYTES + self.layout.fingerprints_bytes].view(torch.int64)

    def raw(self) -> memoryview:
        """Return all of the slot's memory."""
        return memoryview(self._map)[: self.layout.size_bytes]

    def try_lock(self) -> bool:
        """Keep readers out; False where one has it pinned."""
        try:
            fcntl.flock(self._file, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            return False
        return True

    def pin(self) -> None:
        """Keep the writer out until `unlock`, or until this process dies.

        Raises:
            CheckpointError: The slot is being written.
        """
        try:
            fcntl.flock(self._file, fcntl.LOCK_SH | fcntl.LOCK_NB)
        except BlockingIOError as error:
            raise CheckpointError(f"{self.path}: is being written") from error

    def unlock(self) -> None:
        fcntl.flock(self._file, fcntl.LOCK_UN)

    def lock_pages(self) -> None:
        """Page-lock what is not locked yet."""
        self.page_locks.extend(seconds=math.inf)

    def touch(self) -> None:
        """Have the kernel clear the memory now: allocated is not yet cleared, and a page lock would do it."""
        self.buffer[HEADER_BYTES:].zero_()

    def close(self) -> None:
        """Unlock memory and file; the contents stay."""
        self.page_locks.release()
        # closing would not do: the mapping keeps a duplicate of the file descriptor, and with it the lock
        self.unlock()
        os.close(self._file)

    def _write_descriptor(self, descriptor: Descriptor) -> None:
        raw = json.dumps(asdict(descriptor)).encode()
        self._map[_DESCRIPTOR] = raw.ljust(HEADER_BYTES - _DESCRIPTOR.start, b"\0")


def check_notes(notes: Sequence[float] | Tensor, mark: Mark) -> None:
    """Refuse a state that goes past a step whose update was left out and has to be made up for.

    Raises:
        CheckpointError: It does.
    """
    left_out = int(notes[-1])
    if left_out:
        raise CheckpointError(f"step {mark.step}: {left_out} update(s) up to it were left out as not finite")


def root() -> Path:
    """Return the directory of all runs' slots on this machine."""
    return environment.shared_memory() / "holdfast"


def run_directory(run: str, node: str) -> Path:
    """Return the directory of a run's slots on this node."""
    return root() / run / node


def shard_directory(run: str, node: str, place: Place) -> Path:
    """Return the directory of the slots that a rank writes."""
    return run_directory(run, node) / shard_name(place)


def shard_name(place: Place) -> str:
    """Return the name of a directory, in memory or on a disk, of what a rank writes."""
    return f"shard-{place.shard:05d}-of-{place.shards:05d}.{place.replica}"


def slots_of_shard(run: str, node: str, layout: Layout) -> Iterator[Path]:
    """Yield every slot of a shard on this node, the rank's own first, then its HSDP copies'."""
    place = layout.place
    own = shard_directory(run, node, place)
    pattern = f"shard-{place.shard:05d}-of-{place.shards:05d}.*"
    for directory in sorted(listing(own.parent, pattern), key=lambda path: (path != own, path.name)):
        yield from listing(directory, "*.slot")


def read_descriptor(path: Path) -> Descriptor | None:
    """Return a slot file's descriptor, None if there is no file or no slot in it."""
    return _descriptor(_read_header(path))


def _read_header(path: Path) -> bytes:
    """Return the header, empty where there is no file: another rank may have removed it just now."""
    try:
        with path.open("rb") as file:
            return file.read(HEADER_BYTES)
    except OSError:
        return b""


def _descriptor(header: bytes) -> Descriptor | None:
    try:
        return Descriptor(**json.loads(header[_DESCRIPTOR].rstrip(b"\0")))
    except (ValueError, TypeError):
        return None


def scan(run: str) -> Iterator[tuple[Path, Descriptor, Mark | None]]:
    """Yield every slot of a run on this machine with what it holds, None where that is no whole snapshot."""
    for path in listing(root() / run, "*/shard-*/*.slot"):
        raw = _read_header(path)
        descriptor = _descriptor(raw)
        if descriptor is None:
            continue
        header = torch.frombuffer(bytearray(raw), dtype=torch.uint8)
        begin, complete = _mark(header[_BEGIN]), _mark(header[_COMPLETE])
        yield path, descriptor, complete if begin == complete and complete.lineage else None


def fits(path: Path, layout: Layout, descriptor: Descriptor) -> bool:
    """Say whether a whole slot file of this run, model and shard is there."""
    return read_descriptor(path) == descriptor and path.stat().st_size == layout.size_bytes


def sweep_other_meshes(node_directory: Path, *, shards: int) -> None:
    """Remove what a run's earlier world sizes have left on a node, in memory or on its disk."""
    for directory in listing(node_directory, "shard-*"):
        if f"-of-{shards:05d}." not in directory.name:
            shutil.rmtree(directory, ignore_errors=True)


def sweep(directory: Path) -> None:
    """Remove a shard's slots, and the directories above once no slots are in them."""
    shutil.rmtree(directory, ignore_errors=True)
    if not listing(directory.parent, "shard-*"):
        (directory.parent / "keeper").unlink(missing_ok=True)
    for parent in (directory.parent, directory.parent.parent):
        try:
            parent.rmdir()
        except OSError:
            return  # another rank's slots are still there


def check_memory(*, needed_bytes: int, ranks: int, slots: int) -> None:
    """Check, before anything is allocated, that shared memory and RAM can hold a node's slots.

    Too little RAM is only warned of: some virtual machines grow theirs when it is used.

    Args:
        needed_bytes: Bytes that this rank still has to allocate.
        ranks: Ranks of this node, which need as much each.
        slots: Slots a rank.

    Raises:
        RunError: They cannot; the message says what to change.
    """
    root = environment.shared_memory()
    state = os.statvfs(root)
    needed = needed_bytes * ranks
    why = f"{ranks} ranks x {slots} snapshot slots still need {needed / 2**30:.1f} GiB"
    fix = f"use more nodes, or set snapshot.every_steps = 0{_stale_hint(root)}"
    if needed > (free := state.f_bavail * state.f_frsize):
        size = "give the pod a larger /dev/shm"
        raise RunError(f"{root}={free / 2**30:.1f} GiB free: {why}; {size}, {fix}")
    if needed > (available := _available_bytes()):
        gib = available / 2**30
        logger.warning("RAM=%.1f GiB available: %s; the kernel may kill ranks: %s", gib, why, fix)


def _stale_hint(root: Path) -> str:
    runs = [path.name for path in listing(root / "holdfast", "*")]
    return f" (runs that have slots here: {', '.join(runs)}; remove those that are dead)" if runs else ""


def _available_bytes() -> int:
    for line in Path("/proc/meminfo").read_text().splitlines():
        if line.startswith("MemAvailable:"):
            return int(line.split()[1]) << 10
    raise RunError("/proc/meminfo: has no MemAvailable; Holdfast needs Linux 3.14 or newer")


def _allocate(path: Path, size_bytes: int) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    descriptor = os.open(path, os.O_RDWR | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, 0o600)
    try:
        os.posix_fallocate(descriptor, 0, size_bytes)
    except OSError as error:
        path.unlink(missing_ok=True)
        raise RunError(
            f"{path}: cannot allocate {size_bytes / 2**30:.2f} GiB ({error.strerror}); give the pod a "
            "larger /dev/shm"
        ) from error
    finally:
        os.close(descriptor)


def _mark(raw: Tensor) -> Mark:
    lineage, step, position = raw.view(torch.int64).tolist()
    return Mark(lineage=lineage, step=step, position=position)
