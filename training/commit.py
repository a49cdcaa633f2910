"""Checkpoint directories: how one becomes visible, how it is checked, which ones stay.

    RUN_DIR/checkpoints/
        step-00000010/            committed: complete and checked
            .metadata  __0_0.distcp  __1_0.distcp ...   an ordinary DCP directory
            manifest.json         size and xxh3 of every file; written last
        .step-00000020.<lineage>/ being written, or left behind by a kill; never loaded
        LATEST                    name of the newest one: a hint for people, never trusted

Every restore begins a new lineage (`training.lineage`), so two writers never meet in one directory.
"""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Iterable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from training.errors import CheckpointError
from training.files import fsync_directory, write_json, write_text
from training.lineage import Ancestry

MANIFEST = "manifest.json"
_CHUNK_BYTES = 16 << 20
_COMMITTED = re.compile(r"step-(\d{8,})")
_PARTIAL = re.compile(r"\.step-(\d{8,})\.(\w+)")
_REPLACED = re.compile(r"\.replaced-step-(\d{8,})\.(\w+)")


@dataclass(frozen=True, kw_only=True, slots=True)
class FileEntry:
    """What a file of a committed checkpoint must look like."""

    size_bytes: int
    xxh3: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Manifest:
    """Proof that a checkpoint is whole. Written last, so its presence is the commit."""

    version: Literal[1] = 1
    lineage: str
    step: int
    position: int
    world_size: int
    format: Literal["dcp", "torch"]
    files: dict[str, FileEntry]


def committed_path(root: Path, step: int) -> Path:
    return root / f"step-{step:08d}"


def partial_path(root: Path, step: int, lineage: str) -> Path:
    return root / f".step-{step:08d}.{lineage}"


def committed_checkpoints(root: Path) -> list[Path]:
    """Return committed checkpoint directories, newest step first."""
    children = _children(root)
    found = [path for path in children if _COMMITTED.fullmatch(path.name)]
    # killed between the two renames of a replacement, whose first half counts until the second is done
    found += [
        path for path in children if _is_replaced(path) and committed_path(root, step_of(path)) not in found
    ]
    return sorted(found, key=step_of, reverse=True)


def step_of(path: Path) -> int:
    """Return the step in a directory's name."""
    patterns = (_COMMITTED, _PARTIAL, _REPLACED)
    match = next((found for pattern in patterns if (found := pattern.fullmatch(path.name))), None)
    if match is None:
        raise CheckpointError(f"{path}: is no checkpoint directory; give one named step-NNNNNNNN")
    return int(match.group(1))


def hash_files(directory: Path, names: Iterable[str]) -> dict[str, FileEntry]:
    """Return size and xxh3 of files, as they are on disk."""
    return {name: _entry(directory / name) for name in names}


def commit(
    root: Path,
    manifest: Manifest,
    *,
    keep: int,
    ancestry: Ancestry,
) -> Path:
    """Publish a complete partial directory: manifest, rename, LATEST, then retention.

    Args:
        root: Directory of all checkpoints of the run.
        manifest: Contents of the partial directory, every file checked by whoever wrote it.
        keep: Committed checkpoints to keep.
        ancestry: Path of the run, by which states that it has left are told.
    """
    partial = partial_path(root, manifest.step, manifest.lineage)
    final = committed_path(root, manifest.step)
    write_json(partial / MANIFEST, asdict(manifest))
    fsync_directory(partial)
    if final.exists():  # the same step, committed by a lineage that was left before it
        replaced = root / f".replaced-{final.name}.{manifest.lineage}"
        shutil.rmtree(replaced, ignore_errors=True)
        final.rename(replaced)
        partial.rename(final)
        shutil.rmtree(replaced)
    else:
        partial.rename(final)
    fsync_directory(root)
    write_text(root / "LATEST", final.name + "\n")
    prune(root, keep=keep, ancestry=ancestry)
    return final


def is_writing(root: Path) -> bool:
    """Say whether a checkpoint is being written, or was left half-written."""
    return any(_PARTIAL.fullmatch(path.name) for path in _children(root))


def prune(root: Path, *, keep: int, ancestry: Ancestry) -> list[Path]:
    """Remove old checkpoints, those of states that the run has left, and what was left half-written.

    One whose manifest can't be read is left for a person: storage may only have failed to answer.
    Nothing else may be being written: a run saves one checkpoint at a time.

    Args:
        root: Directory of all checkpoints of the run.
        keep: How many live checkpoints stay.
        ancestry: Path of the run.

    Returns:
        What is gone.
    """
    gone: list[Path] = []
    live, left = _by_life(committed_checkpoints(root), ancestry)
    for path in (*live[keep:], *left):
        # rename first: a directory that is being deleted must not look committed
        doomed = root / f".doomed-{path.name.lstrip('.')}"
        shutil.rmtree(doomed, ignore_errors=True)
        path.rename(doomed)
        shutil.rmtree(doomed)
        gone.append(path)
    kept = committed_checkpoints(root)
    for path in _children(root):
        is_leftover = _PARTIAL.fullmatch(path.name) or path.name.startswith((".doomed-", ".replaced-"))
        if is_leftover and path not in kept:
            shutil.rmtree(path, ignore_errors=True)
            gone.append(path)
    return gone


def _by_life(checkpoints: Sequence[Path], ancestry: Ancestry) -> tuple[list[Path], list[Path]]:
    """Return those of live states, and those of states that the run has left."""
    live: list[Path] = []
    left: list[Path] = []
    for path in checkpoints:
        try:
            manifest = read_manifest(path)
        except CheckpointError:
            continue
        (left if ancestry.has_left(manifest.lineage, manifest.step) else live).append(path)
    return live, left


def read_manifest(directory: Path) -> Manifest:
    """Read the manifest of a committed checkpoint.

    Raises:
        CheckpointError: It is missing or unreadable.
    """
    try:
        raw: dict[str, Any] = json.loads((directory / MANIFEST).read_text())
        files = {name: FileEntry(**entry) for name, entry in raw.pop("files").items()}
        manifest = Manifest(**raw, files=files)
    except (OSError, ValueError, KeyError, TypeError, AttributeError) as error:
        raise CheckpointError(f"{directory / MANIFEST}: cannot be read ({error})") from error
    if manifest.version != 1:
        raise CheckpointError(f"{directory / MANIFEST}: version={manifest.version!r}: only 1 is known")
    return manifest


def verify(directory: Path, *, part: int = 0, parts: int = 1) -> Manifest:
    """Check every file against the manifest; `part` of `parts` shares the hashing between ranks.

    Raises:
        CheckpointError: Names the first file that is missing, truncated or changed.
    """
    manifest = read_manifest(directory)
    for index, (name, expected) in enumerate(sorted(manifest.files.items())):
        try:
            _verify_file(directory / name, expected, is_hashed=index % parts == part)
        except FileNotFoundError as error:
            raise CheckpointError(f"{directory / name}: is missing") from error
        except OSError as error:
            raise CheckpointError(f"{directory / name}: cannot be read ({error.strerror})") from error
    return manifest


def _verify_file(path: Path, expected: FileEntry, *, is_hashed: bool) -> None:
    size_bytes = path.stat().st_size
    if size_bytes != expected.size_bytes:
        raise CheckpointError(f"{path}: has {size_bytes} bytes, the manifest says {expected.size_bytes}")
    if is_hashed and _entry(path) != expected:
        raise CheckpointError(f"{path}: its xxh3 differs from the manifest's")


def _is_replaced(path: Path) -> bool:
    return _REPLACED.fullmatch(path.name) is not None


def _entry(path: Path) -> FileEntry:
    digest = xxhash.xxh3_128()
    size_bytes = 0
    with path.open("rb") as file:
        while chunk := file.read(_CHUNK_BYTES):
            digest.update(chunk)
            size_bytes += len(chunk)
    return FileEntry(size_bytes=size_bytes, xxh3=digest.hexdigest())


def _children(root: Path) -> list[Path]:
    return list(root.iterdir()) if root.is_dir() else []
