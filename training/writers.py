"""Three ways to write a checkpoint behind one small interface.

    HoldfastWriter   snapshot into shared memory, written by NVRx's persistent worker (default)
    NvrxTorchWriter  NVRx TorchAsyncCheckpoint(persistent_queue=True): the field's way, GPU only
    DcpSyncWriter    torch's dcp.save on the training thread: the synchronous baseline

The first and the last write DCP, which any number of ranks can load; the second writes one torch file a
rank.
"""

from __future__ import annotations

import logging
import os
import time
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
from training.drain import Save, ShardRequest
from training.errors import CheckpointError, ConfigError
from training.events import EventLog
from training.snapshot import SHARED_MEMORY, Layout, Slot, Snapshotter, make_layout

logger = logging.getLogger(__name__)


class Writer(Protocol):
    """What the checkpointer asks of a writer. Methods are called by every rank, on the training thread."""

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Set up before the first step of an attempt; may use collectives."""

    def begin(self, save: Save, tensors: Mapping[str, Tensor]) -> None:
        """Start a save; returns as soon as the tensors may change after `before_optimizer_step`."""

    def before_optimizer_step(self) -> None:
        """Order the next change of the tensors behind a copy that is still running."""

    def settled(self) -> bool:
        """Return whether this rank's part of the last save has ended, well or not."""

    def abandon(self) -> None:
        """Give the last save up."""

    def close(self) -> None:
        """Release processes and memory."""


class HoldfastWriter:
    """Snapshot on the training thread, everything else in NVRx's persistent worker."""

    def __init__(self, run_dir: Path, *, device: torch.device, events: EventLog, node: str) -> None:
        self._run_dir, self._device, self._events, self._node = run_dir, device, events, node
        self._queue: Any = None
        self._plan: SavePlan | None = None
        self._metadata: Metadata | None = None
        self._layout: Layout | None = None
        self._snapshotter: Snapshotter | None = None

    def prepare(self, tensors: Mapping[str, Tensor]) -> None:
        """Make the plan, the slot and the worker; a later attempt at the same shapes keeps them."""
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
        layout = make_layout(self._plan, tensors)
        if self._snapshotter is None or self._layout != layout:
            self._make_slot(layout)
        if self._queue is None:
            self._start_worker()

    def begin(self, save: Save, tensors: Mapping[str, Tensor]) -> None:
        assert self._snapshotter is not None and self._plan is not None and self._layout is not None
        if not self._worker_alive():
            logger.warning("checkpoint worker died: started again (costs seconds of this save)")
            self._restart_worker()
        self._snapshotter.take(tensors, save.step)
        request = ShardRequest(
            save=save,
            shard=dist.get_rank(),
            slot_path=self._snapshotter.slot.path,
            layout=self._layout,
            plan=self._plan,
            metadata=self._metadata,
            run_dir=self._run_dir,
            node=self._node,
        )
        self._schedule(drain.drain, request)

    def before_optimizer_step(self) -> None:
        if self._snapshotter is not None:
            self._snapshotter.before_optimizer_step()

    def settled(self) -> bool:
        if self._queue is None or self._queue.get_num_unfinalized_calls() == 0:
            return True
        self._queue.maybe_finalize_async_calls(blocking=False, no_dist=True)
        # a dead worker never answers: NVRx would wait for ever (Megatron-LM#6970)
        return self._queue.get_num_unfinalized_calls() == 0 or not self._worker_alive()

    def abandon(self) -> None:
        if self._queue is not None and self._queue.get_num_unfinalized_calls():
            self._restart_worker()

    def close(self) -> None:
        if self._queue is not None:
            self._queue.close(abort=not self.settled())
            self._queue = None
        if self._snapshotter is not None:
            self._snapshotter.slot.close()
            self._snapshotter = None

    def _make_slot(self, layout: Layout) -> None:
        if self._snapshotter is not None:
            self._snapshotter.slot.close()
        name = f"holdfast-{os.getpid()}-{time.monotonic_ns()}.slot"
        slot = Slot(SHARED_MEMORY / name, layout.size_bytes)
        self._snapshotter = Snapshotter(slot, layout, device=self._device)
        self._layout = layout

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

    def begin(self, save: Save, tensors: Mapping[str, Tensor]) -> None:
        dcp.save(dict(tensors), checkpoint_id=save.directory)
        rank = dist.get_rank()
        own = sorted(path.name for path in save.directory.glob(f"__{rank}_*.distcp"))
        drain.leave_result(save, rank, files=own, results=[])
        dist.barrier()
        if rank == 0:
            metadata = commit.hash_files(save.directory, [".metadata"])
            drain.publish(save, files=drain.await_files(save) | metadata, format_="dcp")
        dist.barrier()

    def before_optimizer_step(self) -> None:
        """Nothing runs beside the training thread."""

    def settled(self) -> bool:
        return True

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

    def begin(self, save: Save, tensors: Mapping[str, Tensor]) -> None:
        save.directory.mkdir(parents=True, exist_ok=True)
        # contiguous clones: a view would pickle the whole storage behind it
        local = {
            name: (tensor.to_local() if isinstance(tensor, DTensor) else tensor).contiguous()
            for name, tensor in tensors.items()
        }
        self._save = save
        self._checkpoint.async_save(local, save.directory / rank_file(dist.get_rank()))

    def before_optimizer_step(self) -> None:
        """`async_save` returns after its copy."""

    def settled(self) -> bool:
        if self._save is None:
            return True
        self._checkpoint.finalize_async_save(blocking=False, no_dist=True)
        if self._checkpoint._get_async_calls_queue().get_num_unfinalized_calls():
            return False
        save, self._save = self._save, None
        drain.leave_result(save, dist.get_rank(), files=[rank_file(dist.get_rank())], results=[])
        if dist.get_rank() == 0:
            drain.publish(save, files=drain.await_files(save), format_="torch")
        return True

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
