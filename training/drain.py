"""Writes a snapshot to durable storage, inside NVRx's persistent worker process.

Every rank's worker writes its own shard and leaves a result file; the coordinator's worker waits for all
of them and commits. The training thread takes part in no collective and never waits for storage.
Result files are JSON: nothing that another process wrote is unpickled.
"""

from __future__ import annotations

import ctypes
import json
import os
import signal
import time
from collections.abc import Sequence
from dataclasses import dataclass, field
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
from training.snapshot import Layout, Piece, SlotReader

_PR_SET_PDEATHSIG = 1
_readers: dict[Path, SlotReader] = {}


@dataclass(frozen=True, kw_only=True, slots=True)
class Save:
    """One checkpoint that is being made, as every rank knows it."""

    root: Path
    step: int
    position: int
    attempt: str
    world_size: int
    keep: int
    deadline: float
    """Seconds since the epoch."""

    @property
    def directory(self) -> Path:
        return commit.partial_path(self.root, self.step, self.attempt)


@dataclass(frozen=True, kw_only=True, slots=True)
class ShardRequest:
    """What one rank's worker has to write."""

    save: Save
    shard: int
    slot_path: Path
    layout: Layout
    plan: SavePlan
    metadata: Metadata | None = None
    """Global metadata, for the coordinator alone."""
    run_dir: Path
    node: str
    results: list[WriteResult] = field(default_factory=list)


class SlotPlanner(DefaultSavePlanner):
    """Resolves the items of a plan from a mapped slot instead of from live tensors."""

    def __init__(self, reader: SlotReader, layout: Layout) -> None:
        super().__init__()
        self._reader = reader
        self._pieces: dict[MetadataIndex, Piece] = {piece.item.index: piece for piece in layout.pieces}

    def resolve_data(self, write_item: WriteItem) -> torch.Tensor:
        return self._reader.tensor(self._pieces[write_item.index])


def die_with_parent() -> None:
    """Have the kernel end this worker when its rank dies: NVRx's worker would wait for ever."""
    libc = ctypes.CDLL(None, use_errno=True)
    if libc.prctl(_PR_SET_PDEATHSIG, signal.SIGKILL, 0, 0, 0) != 0:
        raise OSError(ctypes.get_errno(), "prctl(PR_SET_PDEATHSIG) failed")


def drain(request: ShardRequest) -> None:
    """Write a shard; on the coordinator, commit the checkpoint. Entry point in the worker."""
    save = request.save
    with EventLog(request.run_dir, role="writer", node=request.node, rank=request.shard) as events:
        start = time.time()
        try:
            write_shard(request)
            if request.metadata is not None:
                finish(save, request.metadata)
                events.emit("checkpoint", step=save.step, status="committed", seconds=time.time() - start)
        except Exception as error:  # noqa: BLE001 - process boundary: raising would end NVRx's worker
            reason = f"{type(error).__name__}: {error}"
            events.emit("checkpoint", step=save.step, status="failed", reason=reason)
            _report_failure(save, request.shard, reason)


def write_shard(request: ShardRequest) -> None:
    """Write one rank's file from its slot and leave the result file."""
    save = request.save
    if request.slot_path not in _readers:
        _readers.clear()
        _readers[request.slot_path] = SlotReader(request.slot_path)
    reader = _readers[request.slot_path]
    reader.wait_complete(save.step, deadline=save.deadline)
    save.directory.mkdir(parents=True, exist_ok=True)
    writer = FileSystemWriter(save.directory)
    results = writer.write_data(request.plan, SlotPlanner(reader, request.layout)).wait()
    files = {result.storage_data.relative_path for result in results}
    leave_result(save, request.shard, files=sorted(files), results=results)


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
    """Remove the result files and commit."""
    for shard in range(save.world_size):
        _result_path(save, shard).unlink(missing_ok=True)
    manifest = Manifest(
        attempt=save.attempt,
        step=save.step,
        position=save.position,
        world_size=save.world_size,
        format=format_,
        files=files,
    )
    return commit.commit(save.root, manifest, keep=save.keep)


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
        if time.time() > save.deadline:
            raise CheckpointError(f"step {save.step}: no result of rank {shard} before the deadline")
        time.sleep(0.01)


def _report_failure(save: Save, shard: int, reason: str) -> None:
    try:
        save.directory.mkdir(parents=True, exist_ok=True)
        commit.write_json(_result_path(save, shard), {"failure": reason})
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


def worker_process_id() -> int:
    """Return the worker's own process id (used to arm it before the first save)."""
    die_with_parent()
    return os.getpid()
