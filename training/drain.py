"""Writes a snapshot to durable storage, inside NVRx's persistent worker process.

Every rank's worker writes its own shard and leaves a result file; the coordinator's worker waits for all
of them and commits. The training thread takes part in no collective and never waits for storage: it finds
a worker's outcome in shared memory. Nothing that another process wrote is unpickled.
"""

from __future__ import annotations

import ctypes
import json
import signal
import time
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import Metadata, MetadataIndex
from torch.distributed.checkpoint.planner import SavePlan, WriteItem
from torch.distributed.checkpoint.storage import WriteResult

from training import commit
from training.commit import FileEntry, Manifest
from training.errors import CheckpointError
from training.events import EventLog
from training.fault_damage import disk_limit
from training.integrity import fingerprint
from training.layout import Layout
from training.lineage import name_of, read_ancestry
from training.slots import Mark, Slot

_PR_SET_PDEATHSIG = 1
_POLL_SECONDS = 0.01
_CANCELLED = "cancelled"


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One checkpoint that is being made, as every rank knows it."""

    run_dir: Path
    mark: Mark
    world_size: int
    keep: int
    deadline: float
    """Seconds since the epoch."""

    @property
    def root(self) -> Path:
        return self.run_dir / "checkpoints"

    @property
    def step(self) -> int:
        return self.mark.step

    @property
    def directory(self) -> Path:
        return commit.partial_path(self.root, self.step, name_of(self.mark.lineage))


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRequest:
    """What one rank's worker has to write."""

    save: Save
    shard: int
    """Rank, as DCP names files by it."""
    slot_path: Path
    layout: Layout
    plan: SavePlan
    metadata: Metadata | None = None
    """Global metadata, for the coordinator alone."""
    node: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """How a rank's part of a save has ended."""

    step: int
    failure: str = ""


class SlotPlanner(DefaultSavePlanner):
    """Resolves the items of a plan from a mapped slot instead of from live tensors."""

    def __init__(self, slot: Slot, mark: Mark) -> None:
        super().__init__()
        self._slot, self._mark = slot, mark
        self._pieces = {piece.name: piece for piece in slot.layout.pieces}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        name = write_item.index.fqn
        if name in ("step", "position"):
            return torch.tensor(getattr(self._mark, name), dtype=torch.int64)
        return self._slot.view(self._pieces[name])


def die_with_parent() -> None:
    """Have the kernel end this worker when its rank dies: NVRx's worker would wait for ever."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def drain(request: ShardRequest) -> None:
    """Write a shard; on the coordinator, commit the checkpoint. Entry point in the worker."""
    save = request.save
    with EventLog(save.run_dir, role="writer", node=request.node, rank=request.shard) as events:
        start, failure = time.time(), ""
        try:
            write_shard(request)
            if request.metadata is not None:
                finish(save, request.metadata)
                events.emit("checkpoint", step=save.step, status="committed", seconds=time.time() - start)
        except Exception as error:  # noqa: BLE001 - process boundary: raising would end NVRx's worker
            failure = f"{type(error).__name__}: {error}"
            events.emit("checkpoint", step=save.step, status="failed", reason=failure)
            _report_failure(save, request.shard, failure)
        _leave_outcome(request.slot_path, Outcome(step=save.step, failure=failure))


def read_outcome(slot_path: Path, step: int) -> Outcome | None:
    """Return how the save from a slot has ended, None if the worker has not said so."""
    try:
        outcome = Outcome(**json.loads(_outcome_path(slot_path).read_text()))
    except (OSError, ValueError, TypeError):
        return None
    return outcome if outcome.step == step else None


def cancel(save: Save) -> None:
    """Tell the coordinator not to wait for results that will not come."""
    if save.directory.is_dir():
        (save.directory / _CANCELLED).touch()


def write_shard(request: ShardRequest) -> None:
    """Write one rank's file from its slot and leave the result file.

    Raises:
        CheckpointError: The snapshot is incomplete at the deadline, or was damaged in memory.
    """
    save = request.save
    slot = Slot(request.slot_path, request.layout)
    try:
        _pin_complete(slot, save)
        _check_fingerprints(slot)
        save.directory.mkdir(parents=True, exist_ok=True)
        writer = FileSystemWriter(save.directory)
        with disk_limit(save.run_dir, rank=request.shard, size_bytes=request.layout.size_bytes):
            results = writer.write_data(request.plan, SlotPlanner(slot, save.mark)).wait()
    finally:
        slot.close()
    files = {result.storage_data.relative_path for result in results}
    leave_result(save, request.shard, files=sorted(files), results=results)


def _pin_complete(slot: Slot, save: Save) -> None:
    while True:
        try:
            slot.pin()
        except CheckpointError:
            pass  # the copy is still going on
        else:
            if slot.mark() == save.mark:
                return
            slot.unlock()
        if time.time() > save.deadline:
            raise CheckpointError(
                f"snapshot of step {save.step} incomplete at its deadline: the slot holds "
                f"begin={slot.begin_mark()} complete={slot.complete_mark()}"
            )
        time.sleep(_POLL_SECONDS)


def _check_fingerprints(slot: Slot) -> None:
    for piece, expected in zip(slot.layout.pieces, slot.fingerprints().tolist(), strict=True):
        if fingerprint(slot.view(piece)) != expected:
            raise CheckpointError(f"{slot.path}: {piece.name}: was damaged in memory; not written")


def leave_result(save: Save, shard: int, *, files: Sequence[str], results: Sequence[WriteResult]) -> None:
    """Tell the coordinator what a rank has written, checksums included."""
    hashed = commit.hash_files(save.directory, files)
    value = {
        "files": {name: [entry.size_bytes, entry.xxh3] for name, entry in hashed.items()},
        "results": [_result_to_json(result) for result in results],
    }
    commit.write_json(_result_path(save, shard), value)


def finish(save: Save, metadata: Metadata) -> Path:
    """Wait for every rank's result, write DCP's metadata, commit.

    Raises:
        CheckpointError: A rank failed, or its result is missing at the deadline.
    """
    shards = [_await_result(save, shard) for shard in range(save.world_size)]
    writer = FileSystemWriter(save.directory)
    writer.finish(metadata, [[_result_from_json(raw) for raw in shard["results"]] for shard in shards])
    files = {
        name: FileEntry(size_bytes=size_bytes, xxh3=xxh3)
        for shard in shards
        for name, (size_bytes, xxh3) in shard["files"].items()
    }
    return publish(save, files=files | commit.hash_files(save.directory, [".metadata"]), format_="dcp")


def publish(save: Save, *, files: dict[str, FileEntry], format_: Any) -> Path:
    """Remove the result files and commit, unless the run has left the state that was saved.

    Raises:
        CheckpointError: It has.
    """
    await_permission(save)
    for shard in range(save.world_size):
        _result_path(save, shard).unlink(missing_ok=True)
    manifest = Manifest(
        lineage=name_of(save.mark.lineage),
        step=save.step,
        position=save.mark.position,
        world_size=save.world_size,
        format=format_,
        files=files,
    )
    return commit.commit(save.root, manifest, keep=save.keep)


def await_permission(save: Save) -> None:
    """Wait until no restore is going on, and check that the run still goes through the saved state.

    Raises:
        CheckpointError: It does not, or the restore does not end before the deadline.
    """
    while (ancestry := read_ancestry(save.run_dir)).restoring:
        if time.time() > save.deadline:
            raise CheckpointError(f"step {save.step}: a restore was still going on at the deadline")
        time.sleep(_POLL_SECONDS)
    if not ancestry.holds(save.mark.lineage, save.step):
        lineage = name_of(save.mark.lineage)
        raise CheckpointError(f"step {save.step}: the run has left lineage {lineage} before it")


def await_files(save: Save) -> dict[str, FileEntry]:
    """Return the files of all ranks, once every rank has left its result."""
    shards = [_await_result(save, shard) for shard in range(save.world_size)]
    return {
        name: FileEntry(size_bytes=size_bytes, xxh3=xxh3)
        for shard in shards
        for name, (size_bytes, xxh3) in shard["files"].items()
    }


def _await_result(save: Save, shard: int) -> dict[str, Any]:
    path = _result_path(save, shard)
    while True:
        if path.exists():
            result: dict[str, Any] = json.loads(path.read_text())
            if "failure" in result:
                raise CheckpointError(f"step {save.step}: rank {shard} failed: {result['failure']}")
            return result
        if (save.directory / _CANCELLED).exists():
            raise CheckpointError(f"step {save.step}: given up after a fault; rank {shard} did not write")
        if time.time() > save.deadline:
            raise CheckpointError(f"step {save.step}: no result of rank {shard} before the deadline")
        time.sleep(_POLL_SECONDS)


def _report_failure(save: Save, shard: int, reason: str) -> None:
    try:
        save.directory.mkdir(parents=True, exist_ok=True)
        commit.write_json(_result_path(save, shard), {"failure": reason})
    except OSError:
        return  # storage is gone: the coordinator's deadline tells the same


def _leave_outcome(slot_path: Path, outcome: Outcome) -> None:
    commit.write_json(_outcome_path(slot_path), asdict(outcome))


def _outcome_path(slot_path: Path) -> Path:
    return slot_path.parent / "outcome.json"


def _result_path(save: Save, shard: int) -> Path:
    return save.directory / f"result-{shard:05d}.json"


def _result_to_json(result: WriteResult) -> list[Any]:
    index, stored = result.index, result.storage_data
    offset = None if index.offset is None else list(index.offset)
    place = [stored.relative_path, stored.offset, stored.length]
    return [index.fqn, offset, index.index, result.size_in_bytes, place]


def _result_from_json(raw: list[Any]) -> WriteResult:
    fqn, offset, index, size_bytes, place = raw
    return WriteResult(
        index=MetadataIndex(fqn, None if offset is None else torch.Size(offset), index),
        size_in_bytes=size_bytes,
        storage_data=_StorageInfo(*place),
    )
