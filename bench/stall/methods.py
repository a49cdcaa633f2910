"""The ways to save that are compared, each as its own documentation shows it."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import torch
import torch.distributed.checkpoint as dcp

from bench.stall.loop import Loop
from training import lineage
from training.drain import Save
from training.events import EventLog
from training.layout import place_in
from training.lineage import Ancestry
from training.slots import NOTES, Mark
from training.snapshot import Snapshots
from training.writers import HoldfastWriter

_DEADLINE_SECONDS = 900.0
SLOTS = 4
# id of the run that the slots belong to, in a shared-memory directory of this benchmark alone
RUN = "bench"


class Method:
    """One way to save. `save` is called with no other save going on."""

    needs_gpu = False

    def __init__(self, loop: Loop, root: Path) -> None:
        self.loop, self.root = loop, root

    def save(self, directory: Path) -> None:
        """Start a save; the time of this call is time that training stands still."""
        raise NotImplementedError

    def before_optimizer_step(self) -> None:
        """Protect what is still being read from the optimizer."""

    def wait(self) -> None:
        """Wait until the save is durable."""

    def close(self) -> None:
        """Let go of processes and memory."""


class Tier:
    """A rank's snapshots, as the trainer holds them."""

    def __init__(self, loop: Loop, root: Path) -> None:
        self.loop, self.run_dir = loop, root / "run"
        self.run_dir.mkdir()
        self._ancestry = Ancestry().branch(parent=0, step=0)
        lineage.write_ancestry(self.run_dir, self._ancestry)
        self._events = EventLog(self.run_dir, role="rank", node="bench", rank=0)
        self.notes = torch.zeros(NOTES, dtype=torch.float64, device=loop.device)
        self.snapshots = self.make()

    def make(self) -> Snapshots:
        """Return the snapshots that a new process would begin with.

        All rows share the slots' memory: on a machine that grows its memory as it is used, new memory takes
        far longer to set up than memory that was used before.
        """
        snapshots = Snapshots(
            count=SLOTS, ranks_per_node=1, device=self.loop.device, events=self._events, node="bench"
        )
        snapshots.prepare(RUN, self.loop.state.tensors(), place_in(self.loop.mesh))
        snapshots.forget_dead(self._ancestry)
        return snapshots

    def mark(self) -> Mark:
        assert self._ancestry.live is not None
        return Mark(lineage=self._ancestry.live.id, step=self.loop.state.step, position=self.loop.state.step)

    def close(self) -> None:
        self.snapshots.close(sweep=False)
        self._events.close()


class Holdfast(Method):
    """A snapshot is held and written by NVRx's persistent worker."""

    def __init__(self, loop: Loop, root: Path) -> None:
        super().__init__(loop, root)
        self.tier = Tier(loop, root)
        self.tier.snapshots.wait_ready()
        self._writer = HoldfastWriter(self.tier.snapshots, node="bench")
        self._writer.prepare(loop.state.tensors())
        self._pending = False

    def save(self, directory: Path) -> None:
        save = Save(
            run_dir=self.tier.run_dir,
            mark=self.tier.mark(),
            world_size=1,
            keep=1,
            deadline=time.time() + _DEADLINE_SECONDS,
        )
        assert self._writer.begin(save, self.loop.state.tensors(), self.tier.notes)
        self._pending = True

    def before_optimizer_step(self) -> None:
        self.tier.snapshots.before_optimizer_step()

    def poll(self) -> None:
        """Look for the end of the save, as the trainer does at every step."""
        outcome = self._writer.outcome() if self._pending else None
        if outcome is not None:
            assert not outcome.failure, outcome.failure
            self._pending = False

    def wait(self) -> None:
        while self._pending:
            self.poll()
            time.sleep(0.001)

    def close(self) -> None:
        self._writer.close()
        self.tier.close()


class TorchSave(Method):
    """torch.save of the local shards on the training thread."""

    def save(self, directory: Path) -> None:
        directory.mkdir()
        torch.save(
            {name: tensor.cpu() for name, tensor in self.loop.local().items()}, directory / "rank-0.pt"
        )


class DcpSave(Method):
    """dcp.save on the training thread."""

    def save(self, directory: Path) -> None:
        dcp.save(dict(self.loop.state.tensors()), checkpoint_id=directory)


class DcpAsyncSave(Method):
    """dcp.async_save with its thread."""

    _future: Any = None

    def save(self, directory: Path) -> None:
        self._future = dcp.async_save(dict(self.loop.state.tensors()), checkpoint_id=directory)

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None


class NvrxDcp(Method):
    """NVRx's FileSystemWriterAsync with its persistent worker."""

    def __init__(self, loop: Loop, root: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        super().__init__(loop, root)
        self._queue = AsyncCallsQueue(persistent=True, cpu_shm_mode=loop.device.type != "cuda")

    def save(self, directory: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt import state_dict_saver as saver
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync

        directory.mkdir()
        writer = FileSystemWriterAsync(directory, thread_count=4)
        tensors = dict(self.loop.state.tensors())
        if self.loop.device.type != "cuda":  # its worker would share the live storage
            tensors = {name: tensor.clone() for name, tensor in tensors.items()}
        planned = saver.save_state_dict_async_plan(tensors, writer, None, 0, planner=dcp.DefaultSavePlanner())
        function, preload, arguments = writer.get_save_function_and_args()
        metadata = planned[1]
        finish = [lambda: writer.finish(metadata, [writer.retrieve_write_results()])]
        self._queue.schedule_async_request(AsyncRequest(function, arguments, finish, preload_fn=preload))

    def wait(self) -> None:
        self._queue.maybe_finalize_async_calls(blocking=True, no_dist=True)

    def close(self) -> None:
        self._queue.close()


class NvrxTorch(Method):
    """NVRx's TorchAsyncCheckpoint(persistent_queue=True)."""

    needs_gpu = True

    def __init__(self, loop: Loop, root: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        super().__init__(loop, root)
        self._checkpoint = TorchAsyncCheckpoint(persistent_queue=True)

    def save(self, directory: Path) -> None:
        directory.mkdir()
        self._checkpoint.async_save(self.loop.local(), directory / "rank-0.pt")

    def wait(self) -> None:
        self._checkpoint.finalize_async_save(blocking=True, no_dist=True)

    def close(self) -> None:
        self._checkpoint.close()


# those that are quickly measured come first: the time limit hits the others
METHODS: dict[str, type[Method]] = {
    "holdfast": Holdfast,
    "nvrx_dcp": NvrxDcp,
    "nvrx_torch": NvrxTorch,
    "dcp_async_save": DcpAsyncSave,
    "dcp_save": DcpSave,
    "torch_save": TorchSave,
}
