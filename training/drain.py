"""Writes a snapshot to durable storage, inside NVRx's persistent worker process.

Every rank's worker writes its own shard and leaves a result file; the coordinator's worker waits for all
of them and commits. The training thread takes part in no collective and never waits for storage: it finds
a worker's outcome in shared memory. Nothing that lies in storage is unpickled.
"""

from __future__ import annotations

import json
import pickle
import time
from collections.abc import Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
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
from training.drain_worker import Outcome, leave_outcome
from training.errors import CheckpointError
from training.events import EventLog
from training.fault_damage import disk_limit
from training.files import write_json
from training.integrity import fingerprint
from training.layout import Layout
from training.lineage import Ancestry, name_of, read_ancestry
from training.slots import Mark, Slot, check_notes

_POLL_SECONDS = 0.01
_CANCELLED = "cancelled"
_HASHING_THREADS = 4


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One checkpoint that is being made, as every rank knows it."""

    run_dir: Path
    mark: Mark
    world_size: int
    keep: int
    deadline: float
    """Seconds since the epoch."""
    is_urgent: bool = False
    """Whether it goes to storage at once, without a copy on the node's disk before."""

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
class ShardPlan:
    """What a rank has to write at every save of a process group."""

    layout: Layout
    plan: SavePlan
    metadata: Metadata | None = None
    """Global metadata, for the coordinator alone."""

    def frozen(self) -> bytes:
        """Return it pickled: done anew for each save, that would hold the training thread up."""
        return pickle.dumps(self)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRequest:
    """What one rank's worker has to write."""

    save: Save
    shard: int
    """Rank, as DCP names files by it."""
    slot_path: Path
    """A slot in memory, or its image on the node's disk."""
    outcome_path: Path
    plan: bytes
    """A frozen `ShardPlan`."""
    node: str


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


def drain(request: ShardRequest) -> None:
    """Write a shard; on the coordinator, commit the checkpoint. Entry point in the worker."""
    save = request.save
    with EventLog(save.run_dir, role="writer", node=request.node, rank=request.shard) as events:
        start, failure = time.time(), ""
        try:
            plan: ShardPlan = pickle.loads(request.plan)
            write_shard(request, plan)
            if plan.metadata is not None:
                finish(save, plan.metadata)
                events.emit("checkpoint", step=save.step, status="committed", seconds=time.time() - start)
        except Exception as error:  # noqa: BLE001 - process boundary: raising would end NVRx's worker
            failure = f"{type(error).__name__}: {error}"
            events.emit("checkpoint", step=save.step, status="failed", reason=failure)
            _report_failure(save, request.shard, failure)
        leave_outcome(request.outcome_path, Outcome(step=save.step, failure=failure))


def cancel(save: Save) -> None:
    """Tell the coordinator not to wait for results that will not come."""
    if save.directory.is_dir():
        (save.directory / _CANCELLED).touch()


def write_shard(request: ShardRequest, plan: ShardPlan) -> None:
    """Write one rank's file from its slot and leave the result file.

    Raises:
        CheckpointError: The snapshot is incomplete at the deadline, was damaged in memory, or is of a state
            that is going to be left.
    """
    save = request.save
    slot = Slot(request.slot_path, plan.layout)
    try:
        pin_complete(slot, save.mark, deadline=save.deadline)
        check_notes(slot.notes(), save.mark)
        _check_fingerprints(slot)
        save.directory.mkdir(parents=True, exist_ok=True)
        writer = FileSystemWriter(save.directory)
        with disk_limit(save.run_dir, rank=request.shard, size_bytes=plan.layout.size_bytes):
            results = writer.write_data(plan.plan, SlotPlanner(slot, save.mark)).wait()
    finally:
        slot.close()
    files = {result.storage_data.relative_path for result in results}
    leave_result(save, request.shard, files=sorted(files), results=results)


def pin_complete(slot: Slot, mark: Mark, *, deadline: float) -> None:
    """Pin a slot as soon as it holds a whole snapshot.

    Args:
        slot: Where it is being written.
        mark: What it is going to hold.
        deadline: Seconds since the epoch.

    Raises:
        CheckpointError: It does not hold it at the deadline.
    """
    while True:
        try:
            slot.pin()
        except CheckpointError:
            pass  # the copy is still going on
        else:
            if slot.mark() == mark:
                return
            slot.unlock()
        if time.time() > deadline:
            raise CheckpointError(
                f"snapshot of step {mark.step} incomplete at its deadline: the slot holds "
                f"begin={slot.begin_mark()} complete={slot.complete_mark()}"
            )
        time.sleep(_POLL_SECONDS)


def _check_fingerprints(slot: Slot) -> None:
    pieces = slot.layout.pieces
    with ThreadPoolExecutor(_HASHING_THREADS) as threads:
        found = threads.map(lambda piece: fingerprint(slot.view(piece)), pieces)
        for piece, actual, expected in zip(pieces, found, slot.fingerprints().tolist(), strict=True):
            if actual != expected:
                raise CheckpointError(f"{slot.path}: {piece.name}: was damaged in memory; not written")


def leave_result(save: Save, shard: int, *, files: Sequence[str], results: Sequence[WriteResult]) -> None:
    """Tell the coordinator what a rank has written, checksums included."""
    hashed = commit.hash_files(save.directory, files)
    value = {
        "files": {name: [entry.size_bytes, entry.xxh3] for name, entry in hashed.items()},
        "results": [_result_to_json(result) for result in results],
    }
    write_json(_result_path(save, shard), value)


def finish(save: Save, metadata: Metadata) -> Path:
    """Wait for every rank's result, write DCP's metadata, commit.

    Raises:
        CheckpointError: A rank failed, or its result is missing at the deadline.
    """
    shards = _await_results(save)
    writer = FileSystemWriter(save.directory)
    writer.finish(metadata, [[_result_from_json(raw) for raw in shard["results"]] for shard in shards])
    files = _files(shards) | commit.hash_files(save.directory, [".metadata"])
    return publish(save, files=files, format_="dcp")


def publish(save: Save, *, files: dict[str, FileEntry], format_: Any) -> Path:
    """Remove the result files and commit, unless the run has left the state that was saved.

    Raises:
        CheckpointError: It has.
    """
    ancestry = await_permission(save)
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
    return commit.commit(save.root, manifest, keep=save.keep, ancestry=ancestry)


def await_permission(save: Save) -> Ancestry:
    """Wait until no restore is going on, and check that the run still goes through the saved state.

    Returns:
        The path of the run.

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
    return ancestry


def await_files(save: Save) -> dict[str, FileEntry]:
    """Return the files of all ranks, once every rank has left its result."""
    return _files(_await_results(save))


def _await_results(save: Save) -> list[dict[str, Any]]:
    return [_await_result(save, shard) for shard in range(save.world_size)]


def _files(results: Sequence[Mapping[str, Any]]) -> dict[str, FileEntry]:
    return {
        name: FileEntry(size_bytes=size_bytes, xxh3=xxh3)
        for result in results
        for name, (size_bytes, xxh3) in result["files"].items()
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
        write_json(_result_path(save, shard), {"failure": reason})
    except OSError:
        return  # storage is gone: the coordinator's deadline tells the same


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
