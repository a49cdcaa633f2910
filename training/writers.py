"""Three ways to write a checkpoint behind one small interface.

    HoldfastWriter   a held snapshot, written by NVRx's persistent worker (default)
    NvrxTorchWriter  NVRx TorchAsyncCheckpoint(persistent_queue=True): the field's way, GPU only
    DcpSyncWriter    torch's dcp.save on the training thread: the synchronous baseline

The first and the last write DCP, which any number of ranks can load; the second writes one torch file a
rank.
"""

from __future__ import annotations

import logging
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter
from torch.distributed.checkpoint.metadata import Metadata
from torch.distributed.checkpoint.planner import SavePlan
from torch.distributed.tensor import DTensor

from training import commit, drain
from training.drain import Outcome, Save, ShardRequest
from training.errors import CheckpointError, ConfigError
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

    def abandon(self) -> None:
        """Give the last save up."""

    def close(self) -> None:
        """Release processes and memory."""


class HoldfastWriter:
    """Holds a snapshot on the training thread; all else is done by NVRx's persistent worker."""

    def __init__(self, snapshots: Snapshots, *, node: str) -> None:
        self._snapshots, self._node = snapshots, node
        self._queue: Any = None
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._request: ShardRequest | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the plan, and the worker, which a later attempt keeps."""
        planner = DefaultSavePlanner()
        planner.set_up_planner(dict(tensors), is_coordinator=dist.get_rank() == 0)
        plans: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(plans, planner.create_local_plan())
        plans, metadata = planner.create_global_plan(plans)
        self._plan = replace(
            planner.finish_plan(plans[dist.get_rank()]),
            # the name that FileSystemWriter.prepare_global_plan gives to this rank's files
            storage_data=FileSystemWriter("").prepare_global_plan(plans)[dist.get_rank()].storage_data,
        )
        self._metadata = metadata if dist.get_rank() == 0 else None
        if self._queue is None:
            self._start_worker()

    def begin(self, save: Save, tensors: Mapping[str, Tensor], notes: Tensor) -> bool:
        assert self._plan is not None
        if not self._worker_alive():
            logger.warning("checkpoint worker died: started again (costs seconds of this save)")
            self._restart_worker()
        self._snapshots.wait_ready()
        slot_path = self._snapshots.hold(save.mark, notes)
        if slot_path is None:
            return False
        self._request = ShardRequest(
            save=save,
            shard=dist.get_rank(),
            slot_path=slot_path,
            layout=self._snapshots.layout,
            plan=self._plan,
            metadata=self._metadata,
            node=self._node,
        )
        self._schedule(drain.drain, self._request)
        return True

    def outcome(self) -> Outcome | None:
        assert self._request is not None
        # opens the slot to the worker once the copy on the GPU is done
        self._snapshots.open_to_readers()
        self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        request = self._request
        if self._queue.get_num_unfinalized_calls() == 0:
            step = request.save.step
            found = drain.read_outcome(request.slot_path, step)
            return self._ended(found or Outcome(step=step, failure="its worker left no outcome"))
        # a dead worker never answers: NVRx would wait for ever (Megatron-LM#6970)
        if not self._worker_alive():
            return self._ended(Outcome(step=request.save.step, failure="its worker died"))
        return None

    def abandon(self) -> None:
        if self._queue.get_num_unfinalized_calls():
            self._restart_worker()
        self._snapshots.release()

    def close(self) -> None:
        if self._queue is not None:
            running = self._queue.get_num_unfinalized_calls() and self._worker_alive()
            self._queue.close(abort=bool(running))
            self._queue = None

    def _ended(self, outcome: Outcome) -> Outcome:
        self._snapshots.release()
        return outcome

    def _start_worker(self) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        # cpu_shm_mode: the worker opens no CUDA context, it reads the slot in host memory
        self._queue = AsyncCallsQueue(persistent=True, cpu_shm_mode=True, sigterm_timeout=5.0)
        self._schedule(drain.die_with_parent)

    def _restart_worker(self) -> None:
        self._queue.close(abort=True)
        self._queue.async_calls.clear()
        self._start_worker()

    def _worker_alive(self) -> bool:
        caller = self._queue.persistent_caller
        return caller is not None and caller.process is not None and caller.process.is_alive()

    def _schedule(self, function: Any, *arguments: Any) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest

        self._queue.schedule_async_request(AsyncRequest(function, arguments, []))


class DcpSyncWriter:
    """torch's synchronous save, committed like the others."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Need nothing."""

    def __init__(self) -> None:
        self._step = 0

    def begin(self, save: Save, tensors: Mapping[str, Tensor], notes: Tensor) -> bool:
        dcp.save(dict(tensors), checkpoint_id=save.directory)
        rank = dist.get_rank()
        own = sorted(path.name for path in save.directory.glob(f"__{rank}_*.distcp"))
        drain.leave_result(save, rank, files=own, results=[])
        dist.barrier()
        if rank == 0:
            metadata = commit.hash_files(save.directory, [".metadata"])
            drain.publish(save, files=drain.await_files(save) | metadata, format_="dcp")
        dist.barrier()
        self._step = save.step
        return True

    def outcome(self) -> Outcome | None:
        return Outcome(step=self._step)

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

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        if self._checkpoint is None:
            self._checkpoint = TorchAsyncCheckpoint(persistent_queue=True)

    def begin(self, save: Save, tensors: Mapping[str, Tensor], notes: Tensor) -> bool:
        save.directory.mkdir(parents=True, exist_ok=True)
        # contiguous clones: a view would pickle the whole storage behind it
        local = {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous()
            for name, tensor in tensors.items()
        }
        self._save = save
        self._checkpoint.async_save(local, save.directory / rank_file(dist.get_rank()))
        return True

    def outcome(self) -> Outcome | None:
        assert self._save is not None
        self._checkpoint.finalize_async_save(blocking=False, no_dist=True)
        if self._checkpoint._get_async_calls_queue().get_num_unfinalized_calls():
            return None
        save, self._save = self._save, None
        drain.leave_result(save, dist.get_rank(), files=[rank_file(dist.get_rank())], results=[])
        if dist.get_rank() == 0:
            drain.publish(save, files=drain.await_files(save), format_="torch")
        return Outcome(step=save.step)

    def abandon(self) -> None:
        self._save = None
        if self._checkpoint is not None:
            self._checkpoint._get_async_calls_queue().close(abort=True)

    def close(self) -> None:
        if self._checkpoint is not None:
            self._checkpoint.close()


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
