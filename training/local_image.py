"""Images of snapshot slots on a node's own disk (NVMe): they outlive the node's memory, not the node.

    DIRECTORY/holdfast/RUN/NODE/shard-00001-of-00004.0/
        step-00000020.LINEAGE/      whole: the manifest was written last, then the directory renamed
            image                   the slot as it was in memory: marks, notes, fingerprints, tensors
            manifest.json           whose it is; size and xxh3 of the image
        .step-00000040.LINEAGE/     being written, or left behind by a kill; never loaded

Each shard stands for itself: which step all ranks have is found out when it is needed, by the same rule
as for slots in memory.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import time
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

import xxhash

from training import commit
from training.commit import FileEntry
from training.drain import pin_complete
from training.drain_worker import Outcome, leave_outcome
from training.errors import CheckpointError
from training.events import EventLog
from training.files import fsync_directory, listing, write_json
from training.layout import Layout, Place
from training.lineage import Ancestry, name_of, read_ancestry
from training.slots import Descriptor, Mark, Slot, check_notes, shard_name

IMAGE = "image"
_CHUNK_BYTES = 16 << 20
_WHOLE = re.compile(r"step-\d{8,}\.\w+")


@dataclass(frozen=True, kw_only=True, slots=True)
class ImageManifest:
    """Proof that an image is whole."""

    version: int = 1
    descriptor: Descriptor
    mark: Mark
    image: FileEntry


@dataclass(frozen=True, kw_only=True, slots=True)
class CopyRequest:
    """What a rank's worker has to copy."""

    run_dir: Path
    directory: Path
    """Of all images of the shard."""
    slot_path: Path
    outcome_path: Path
    layout: Layout
    descriptor: Descriptor
    mark: Mark
    keep: int
    deadline: float
    """Seconds since the epoch."""
    node: str
    rank: int


def run_path(root: Path, run: str) -> Path:
    """Return the directory of a run's images on this machine."""
    return root / "holdfast" / run


def shard_path(root: Path, run: str, node: str, place: Place) -> Path:
    """Return the directory of the images that a rank writes."""
    return run_path(root, run) / node / shard_name(place)


def image_path(directory: Path, mark: Mark) -> Path:
    return directory / f"step-{mark.step:08d}.{name_of(mark.lineage)}" / IMAGE


def copy(request: CopyRequest) -> None:
    """Make an image of a slot. Entry point in the worker."""
    with EventLog(request.run_dir, role="writer", node=request.node, rank=request.rank) as events:
        start, failure = time.time(), ""
        try:
            write_image(request)
        except Exception as error:  # noqa: BLE001 - process boundary: raising would end NVRx's worker
            failure = f"{type(error).__name__}: {error}"
        status = "failed" if failure else "whole"
        seconds = time.time() - start
        events.emit("local_copy", step=request.mark.step, status=status, seconds=seconds, reason=failure)
        leave_outcome(request.outcome_path, Outcome(step=request.mark.step, failure=failure))


def write_image(request: CopyRequest) -> None:
    """Write the image and its manifest, rename, then remove what is too old.

    Raises:
        CheckpointError: The snapshot is incomplete at the deadline, or of a state that is going to be left.
        OSError: The disk does not take it.
    """
    final = image_path(request.directory, request.mark).parent
    partial = final.with_name("." + final.name)
    shutil.rmtree(partial, ignore_errors=True)
    partial.mkdir(parents=True)
    slot = Slot(request.slot_path, request.layout)
    try:
        pin_complete(slot, request.mark, deadline=request.deadline)
        check_notes(slot.notes(), request.mark)
        entry = _write(partial / IMAGE, slot)
    finally:
        slot.close()
    manifest = ImageManifest(descriptor=request.descriptor, mark=request.mark, image=entry)
    write_json(partial / commit.MANIFEST, asdict(manifest))
    fsync_directory(partial)
    shutil.rmtree(final, ignore_errors=True)
    partial.rename(final)
    fsync_directory(request.directory)
    prune(request.directory, keep=request.keep, ancestry=read_ancestry(request.run_dir))


def whole_images(directory: Path) -> Iterator[tuple[Path, ImageManifest]]:
    """Yield the images of a shard whose manifest can be read."""
    for path in listing(directory, "step-*"):
        if _WHOLE.fullmatch(path.name) is None:
            continue
        try:
            yield path / IMAGE, read_image_manifest(path)
        except CheckpointError:
            continue


def read_image_manifest(directory: Path) -> ImageManifest:
    """Read the manifest beside an image.

    Raises:
        CheckpointError: It is missing or unreadable.
    """
    path = directory / commit.MANIFEST
    try:
        raw = json.loads(path.read_text())
        return ImageManifest(
            version=raw["version"],
            descriptor=Descriptor(**raw["descriptor"]),
            mark=Mark(**raw["mark"]),
            image=FileEntry(**raw["image"]),
        )
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise CheckpointError(f"{path}: cannot be read ({error})") from error


def scan(root: Path, run: str) -> Iterator[tuple[Path, ImageManifest]]:
    """Yield every whole image of a run on this machine."""
    for directory in listing(run_path(root, run), "*/shard-*"):
        yield from whole_images(directory)


def prune(directory: Path, *, keep: int, ancestry: Ancestry) -> None:
    """Keep the newest live images of a shard; remove all else. A reader keeps what it has mapped."""
    live = [
        path.parent
        for path, manifest in sorted(whole_images(directory), key=lambda found: found[1].mark.step)
        if ancestry.holds(manifest.mark.lineage, manifest.mark.step)
    ]
    for path in listing(directory, "*"):
        if path not in live[-keep:]:
            shutil.rmtree(path, ignore_errors=True)


def remove_dead(directory: Path, ancestry: Ancestry) -> None:
    """Remove the whole images of states that the run has left."""
    for path, manifest in list(whole_images(directory)):
        if not ancestry.holds(manifest.mark.lineage, manifest.mark.step):
            shutil.rmtree(path.parent, ignore_errors=True)


def _write(path: Path, slot: Slot) -> FileEntry:
    digest = xxhash.xxh3_128()
    data = slot.raw()
    with path.open("wb") as file:
        for start in range(0, len(data), _CHUNK_BYTES):
            chunk = data[start : start + _CHUNK_BYTES]
            digest.update(chunk)
            file.write(chunk)
        file.flush()
        os.fsync(file.fileno())
    return FileEntry(size_bytes=len(data), xxh3=digest.hexdigest())
