"""Damage that planned faults do to saved state: bits that flip, memory that is lost, a disk that is full."""

from __future__ import annotations

import contextlib
import resource
import shutil
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training import commit, slots
from training.config import JobShape
from training.files import listing
from training.layout import Place
from training.run_directory import read_run_id

# A checkpoint that is being written is waited for this long; the other ranks stand still meanwhile.
COMMIT_SECONDS = 2.0
_POLL_SECONDS = 0.02
# Slots and their pieces are aligned to this, so the first byte of such a block is no padding.
_BLOCK_BYTES = 512


@dataclass(frozen=True, kw_only=True, slots=True)
class Target:
    """Whose state is damaged."""

    run_dir: Path
    job: JobShape
    rank: int
    node: str

    def flip_snapshot(self) -> dict[str, Any] | None:
        """Flip a bit of the rank's newest whole snapshot; return its step, None if there is none."""
        run = read_run_id(self.run_dir)
        directory = slots.shard_directory(run, self.node, self._place())
        whole = [
            (mark.step, path)
            for path, _, mark in slots.scan(run)
            if mark is not None and path.parent == directory
        ]
        if not whole:
            return None
        step, path = max(whole)
        flip_bit(path)
        return {"damaged_step": step}

    def flip_checkpoint(self) -> dict[str, Any] | None:
        """Flip a bit of the newest checkpoint and lose the rank's snapshots; return the checkpoint's path.

        Nothing is done, and None returned, while there is no older checkpoint to fall back on.
        """
        root = self.run_dir / "checkpoints"
        deadline = time.monotonic() + COMMIT_SECONDS
        # one that is being written would be the newest in the end
        while commit.is_writing(root) or len(commit.committed_checkpoints(root)) < 2:
            if time.monotonic() > deadline:
                break
            time.sleep(_POLL_SECONDS)
        found = commit.committed_checkpoints(root)
        if len(found) < 2:
            return None
        flip_bit(max(found[0].glob("*.distcp"), key=lambda path: path.stat().st_size))
        self._lose_snapshots()
        return {"damaged_path": str(found[0])}

    def _lose_snapshots(self) -> None:
        """Remove the rank's slots, and copies of its shard on this node."""
        own = slots.shard_directory(read_run_id(self.run_dir), self.node, self._place())
        for directory in listing(own.parent, f"{own.name.rpartition('.')[0]}.*"):
            shutil.rmtree(directory, ignore_errors=True)

    def _place(self) -> Place:
        """Return the rank's place in the mesh, as `layout.place_in` tells it where a group is open."""
        shards = self.job.world_size // self.job.replicas
        return Place(shard=self.rank % shards, shards=shards, replica=self.rank // shards)


def flip_bit(path: Path) -> None:
    """Flip the lowest bit of a number three quarters into a file of tensors."""
    with path.open("r+b") as file:
        file.seek(0, 2)
        offset = file.tell() * 3 // 4 // _BLOCK_BYTES * _BLOCK_BYTES
        file.seek(offset)
        value = file.read(1)[0]
        file.seek(offset)
        file.write(bytes([value ^ 1]))


def fill_disk(run_dir: Path, *, rank: int) -> None:
    """Have the next `disk_limit` of a rank find no space."""
    mark = _full_disk_mark(run_dir, rank)
    mark.parent.mkdir(parents=True, exist_ok=True)
    mark.touch()


@contextlib.contextmanager
def disk_limit(run_dir: Path, *, rank: int, size_bytes: int) -> Iterator[None]:
    """Write a part of a checkpoint; after a planned `full_disk`, the kernel stops it half-way, once.

    The limit holds for this process alone (EFBIG), so a rehearsal fills no real disk.

    Args:
        run_dir: Directory of the run.
        rank: Whose part it is.
        size_bytes: About how large the part is.
    """
    try:
        _full_disk_mark(run_dir, rank).unlink()
    except FileNotFoundError:
        yield
        return
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    resource.setrlimit(resource.RLIMIT_FSIZE, (size_bytes // 2, hard))
    try:
        yield
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))


def _full_disk_mark(run_dir: Path, rank: int) -> Path:
    return run_dir / "faults" / f"full_disk-{rank}"
