"""Three ways to write a checkpoint behind one small interface.

    HoldfastWriter   a held snapshot, written by NVRx's persistent worker (default)
    NvrxTorchWriter  NVRx TorchAsyncCheckpoint(persistent_queue=True): the field's way, GPU only
    DcpSyncWriter    torch's dcp.save on the training thread: the synchronous baseline

The first and the last write DCP, which any number of ranks can load; the second writes one torch file a
rank.
"""

from __future__ import annotations

import logging
import time
from collections.abc import Mapping
from concurrent.futures import Future, ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.tensor import DTensor

from training import commit, drain
from training.drain import Save, ShardPlan, ShardRequest
from training.drain_worker import DrainWorker, Outcome
from training.errors import CheckpointError, ConfigError
from training.local_copies import LocalCopies
from training.slots import check_notes
from training.snapshot import Snapshots

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """What the checkpointer asks of a writer. Methods are called by every rank, on the training thread."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Set up before the first step of an attempt; may use collectives."""

    def begin(self, save: Save, tensors: Mapping[str, Tensor], notes: Tensor) -> bool:
        """Start a save of the state as it is now; False if there is no memory for it."""

    def outcome(self) -> Outcome | None:
        """Return how this rank's part of the last save has ended, None while it goes on."""

    def hurry(self) -> None:
        """Write what is pending by the shortest way."""

    def abandon(self) -> None:
        """Give the last save up."""

    def close(self) -> None:
        """Release processes and memory."""


class HoldfastWriter:
    """Holds a snapshot on the training thread; all else is done by NVRx's persistent worker."""

    def __init__(self, snapshots: Snapshots, *, node: str, copies: LocalCopies | None = None) -> None:
        """Begin.

        Args:
            snapshots: Where the state is taken from.
            node: Name in events.
            copies: Copies on the node's disk. Where there are some, a save begins with one and is written
                from it, so that the slot in memory is free again in seconds.
        """
        self._snapshots, self._node, self._copies = snapshots, node, copies
        self._worker = DrainWorker("checkpoint")
        self._plan = b""
        self._request: ShardRequest | None = None
        self._is_copying = False

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the plan, and the worker, which a later attempt keeps."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(tensors), is_coordinator=dist.get_rank() == 0)
        plans: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(plans, planner.create_local_plan())
        plans, metadata = planner.create_global_plan(plans)
        plan = replace(
            planner.finish_plan(plans[dist.get_rank()]),
            # the name that FileSystemWriter.prepare_global_plan gives to this rank's files
            storage_data=FileSystemWriter("").prepare_global_plan(plans)[dist.get_rank()].storage_data,
        )
        shard_plan = ShardPlan(
            layout=self._snapshots.layout, plan=plan, metadata=metadata if dist.get_rank() == 0 else None
        )
        self._plan = shard_plan.frozen()
        self._worker.start()

    def begin(self, save: Save, tensors: Mapping[str, Tensor], notes: Tensor) -> bool:
        self._snapshots.wait_ready()
        slot_path = self._snapshots.hold(save.mark, notes)
        if slot_path is None:
            return False
        self._request = ShardRequest(
            save=save,
            shard=dist.get_rank(),
            slot_path=slot_path,
            outcome_path=self._snapshots.directory / "save.json",
            plan=self._plan,
            node=self._node,
        )
        self._is_copying = self._copies is not None and not save.is_urgent
        if self._copies is not None and self._is_copying:
            # a disk that hangs must leave the save the time to be written from memory
            self._copies.begin(save.mark, slot_path, deadline=(time.time() + save.deadline) / 2)
        else:
            self._worker.submit(drain.drain, self._request)
        return True

    def outcome(self) -> Outcome | None:
        assert self._request is not None
        # opens the slot to the worker once the copy on the GPU is done
        self._snapshots.open_to_readers()
        if self._is_copying:
            self._go_on_from_copy(self._request)
            return None
        outcome = self._worker.outcome(self._request.outcome_path, self._request.save.step)
        if outcome is not None:
            self._snapshots.release(self._request.slot_path)
        return outcome

    def hurry(self) -> None:
        if self._is_copying and self._copies is not None and self._request is not None:
            self._copies.give_up()
            self._is_copying = False
            self._worker.submit(drain.drain, self._request)

    def abandon(self) -> None:
        if self._is_copying and self._copies is not None:
            self._copies.give_up()
        self._is_copying = False
        self._worker.abandon()
        if self._request is not None:
            self._snapshots.release(self._request.slot_path)

    def close(self) -> None:
        self._worker.close()

    def _go_on_from_copy(self, request: ShardRequest) -> None:
        """Once the node's disk has the state, write it from there; else from the slot that is still held."""
        assert self._copies is not None
        copied = self._copies.outcome()
        if copied is None:
            return
        self._is_copying = False
        if not copied.failure:
            self._snapshots.release(request.slot_path)
            request = replace(request, slot_path=self._copies.image_path(request.save.mark))
        self._request = request
        self._worker.submit(drain.drain, request)


class DcpSyncWriter:
    """torch's synchronous save, committed like the others."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Need nothing."""

    def __init__(self) -> None:
        self._outcome: Outcome | None = None

    def begin(self, save: Save, tensors: Mapping[str, Tensor], notes: Tensor) -> bool:
        try:
            check_notes(notes, save.mark)  # the same on all ranks
        except CheckpointError as error:
            self._outcome = Outcome(step=save.step, failure=str(error))
            return True
        dcp.save(dict(tensors), checkpoint_id=save.directory)
        rank = dist.get_rank()
        own = sorted(path.name for path in save.directory.glob(f"__{rank}_*.distcp"))
        drain.leave_result(save, rank, files=own, results=[])
        dist.barrier()
        if rank == 0:
            metadata = commit.hash_files(save.directory, [".metadata"])
            drain.publish(save, files=drain.await_files(save) | metadata, format_="dcp")
        dist.barrier()
        self._outcome = Outcome(step=save.step)
        return True

    def outcome(self) -> Outcome | None:
        return self._outcome

    def hurry(self) -> None:
        """It is over already."""

    def abandon(self) -> None:
        """Nothing is ever left running."""

    def close(self) -> None:
        """Hold nothing."""


class NvrxTorchWriter:
    """NVRx's TorchAsyncCheckpoint as its users run it, committed like the others."""

    def __init__(self, *, device: torch.device) -> None:
        if device.type != "cuda":
            raise ConfigError.of(
                "checkpoint.writer",
                "nvrx_torch",
                "NVRx's TorchAsyncCheckpoint needs a GPU",
                'use "holdfast"',
            )
        self._checkpoint: Any = None
        self._save: Save | None = None
        self._notes: Tensor | None = None
        self._thread = ThreadPoolExecutor(1, "finish-checkpoint")
        self._finishing: Future[None] | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        if self._checkpoint is None:
            self._checkpoint = TorchAsyncCheckpoint(persistent_queue=True)

    def begin(self, save: Save, tensors: Mapping[str, Tensor], notes: Tensor) -> bool:
        self.prepare(tensors)  # it may have been abandoned
        save.directory.mkdir(parents=True, exist_ok=True)
        # a view that is not contiguous would pickle the whole storage behind it
        local = {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous()
            for name, tensor in tensors.items()
        }
        self._save, self._notes = save, notes
        self._checkpoint.async_save(local, save.directory / rank_file(dist.get_rank()))
        return True

    def outcome(self) -> Outcome | None:
        save, notes = self._save, self._notes
        assert save is not None
        assert notes is not None
        if self._finishing is None:
            queue = self._checkpoint._get_async_calls_queue()
            self._checkpoint.finalize_async_save(blocking=False, no_dist=True)
            if queue.get_num_unfinalized_calls():
                is_alive = queue.persistent_caller.process.is_alive()
                return None if is_alive else Outcome(step=save.step, failure="its worker died")
            # hashes what may be gigabytes, and waits for other ranks: not on the training thread
            self._finishing = self._thread.submit(_finish_rank_file, save, dist.get_rank(), notes)
        if not self._finishing.done():
            return None
        error, self._finishing = self._finishing.exception(), None
        return Outcome(step=save.step, failure=f"{type(error).__name__}: {error}" if error else "")

    def hurry(self) -> None:
        """There is one way only."""

    def abandon(self) -> None:
        self._finishing = None
        if self._checkpoint is not None:
            self._checkpoint._get_async_calls_queue().close(abort=True)
            self._checkpoint = None

    def close(self) -> None:
        self._thread.shutdown(wait=False, cancel_futures=True)
        if self._checkpoint is not None:
            self._checkpoint.close()


def _finish_rank_file(save: Save, rank: int, notes: Tensor) -> None:
    check_notes(notes, save.mark)  # not before: the device would be waited for
    drain.leave_result(save, rank, files=[rank_file(rank)], results=[])
    if rank == 0:
        drain.publish(save, files=drain.await_files(save), format_="torch")


def rank_file(rank: int) -> str:
    """Return the name of a rank's file in a checkpoint of format `torch`."""
    return f"rank-{rank:05d}.pt"


def load_rank_file(directory: Path, tensors: Mapping[str, Tensor]) -> None:
    """Load this rank's file of a `torch` checkpoint in place.

    Raises:
        CheckpointError: The file holds other tensors than this rank's.
    """
    path = directory / rank_file(dist.get_rank())
    loaded = torch.load(path, map_location="cpu", weights_only=True, mmap=True)
    for name, tensor in tensors.items():
        local = tensor.to_local() if isinstance(tensor, DTensor) else tensor
        if name not in loaded or loaded[name].shape != local.shape:
            raise CheckpointError(
                f"{path}: {name} is missing or of another shape; nvrx_torch checkpoints load only at the "
                "number of ranks that wrote them"
            )
        local.copy_(loaded[name])
