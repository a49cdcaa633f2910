"""What a save costs the training loop, all writers side by side in one run.

    python -m bench.checkpoint_stall --output stall.jsonl                    8 GB of state, one GPU
    python -m bench.checkpoint_stall --device cpu --width 64 --layers 2      small, to try it

Cost of a save = (time of the window - steps x median undisturbed step) / saves, so a writer that steals
GPU, PCIe or interpreter time is charged for it too. The disk is whatever `--directory` lies on.
"""

from __future__ import annotations

import argparse
import json
import os
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Protocol

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from training import environment, lineage, model, weights
from training.config import ModelConfig, OptimizerConfig
from training.drain import Save
from training.events import EventLog
from training.layout import local_tensors, place_in
from training.lineage import Ancestry
from training.slots import NOTES, Mark
from training.snapshot import Snapshots
from training.state import TrainState, make_state
from training.writers import HoldfastWriter

_DEADLINE_SECONDS = 900.0


@dataclass(frozen=True, kw_only=True, slots=True)
class Row:
    """One writer's figures."""

    writer: str
    step_ms: float
    """Median of all steps, those with a save included."""
    call_ms: float
    """Median time of the call that starts a save."""
    cost_per_save_ms: float
    cost_in_steps: float
    window_percent: float
    """By how much the whole window is longer than the same steps undisturbed."""
    drain_seconds: float
    """From the last step to the last save being durable."""
    state_gb: float


class Loop:
    """A Llama under FSDP2 on one rank, trained on random tokens."""

    def __init__(self, arguments: argparse.Namespace, device: torch.device) -> None:
        fields = {
            "model_type": "llama",
            "hidden_size": arguments.width,
            "intermediate_size": 4 * arguments.width,
            "num_hidden_layers": arguments.layers,
            "num_attention_heads": max(1, arguments.width // 128),
            "num_key_value_heads": max(1, arguments.width // 128),
            "vocab_size": arguments.vocabulary,
            "max_position_embeddings": arguments.length,
        }
        config = ModelConfig(config=fields)
        self.mesh = init_device_mesh(device.type, (1,))
        task = model.LanguageModelTask(
            model.build_model(model.load_model_config(config)), loss_chunk_tokens=2048
        )
        model.shard(task, self.mesh, config, bf16=device.type == "cuda")
        task.to_empty(device=device)
        weights.initialize(task.model, seed=0, device=device)
        self.task, self.device = task, device
        self.state: TrainState = make_state(task.model, OptimizerConfig(learning_rate=1e-4), device=device)
        shape = (arguments.batch, arguments.length + 1)
        self._tokens = torch.randint(0, arguments.vocabulary, shape, device=device)

    def step(self, before_optimizer_step: Callable[[], None]) -> None:
        loss = self.task(self._tokens) / self._tokens.numel()
        loss.backward()
        before_optimizer_step()
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.state.step += 1

    def wait(self) -> None:
        """Wait for the compute stream alone: the copy stream's work is what may be hidden."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def local(self) -> dict[str, Tensor]:
        return local_tensors(self.state.tensors())


class Method(Protocol):
    """One way to save."""

    def save(self, directory: Path) -> None: ...
    def before_optimizer_step(self) -> None: ...
    def after_step(self) -> None: ...
    def wait(self) -> None: ...
    def close(self) -> None: ...


class Undisturbed:
    """No save: the baseline, and what the others share."""

    def __init__(self, loop: Loop, root: Path) -> None:
        self.loop, self.root = loop, root

    def save(self, directory: Path) -> None:
        """Save nothing."""

    def before_optimizer_step(self) -> None:
        """Wait for nothing."""

    def after_step(self) -> None:
        """Do nothing."""

    def wait(self) -> None:
        """Wait for nothing."""

    def close(self) -> None:
        """Hold nothing."""


class Holdfast(Undisturbed):
    """A snapshot is held and written by NVRx's persistent worker."""

    every_step = False

    def __init__(self, loop: Loop, root: Path) -> None:
        super().__init__(loop, root)
        self._run_dir = root / f"holdfast-{time.monotonic_ns()}"
        self._run_dir.mkdir()
        lineage.write_ancestry(self._run_dir, Ancestry().branch(parent=0, step=0))
        live = lineage.read_ancestry(self._run_dir).live
        assert live is not None
        self._lineage = live.id
        self._events = EventLog(self._run_dir, role="rank", node="bench", rank=0)
        self._snapshots = Snapshots(
            count=4, ranks_per_node=1, device=loop.device, events=self._events, node="bench"
        )
        tensors = loop.state.tensors()
        self._snapshots.prepare(self._run_dir.name, tensors, place_in(loop.mesh))
        self._snapshots.wait_ready()
        self._writer = HoldfastWriter(self._snapshots, node="bench")
        self._writer.prepare(tensors)
        self._notes = torch.zeros(NOTES, dtype=torch.float64, device=loop.device)
        self._pending = False

    def save(self, directory: Path) -> None:
        self.wait()
        save = Save(
            run_dir=self._run_dir,
            mark=self._mark(),
            world_size=1,
            keep=2,
            deadline=time.time() + _DEADLINE_SECONDS,
        )
        assert self._writer.begin(save, self.loop.state.tensors(), self._notes)
        self._pending = True

    def before_optimizer_step(self) -> None:
        self._snapshots.before_optimizer_step()

    def after_step(self) -> None:
        if self.every_step:
            self._snapshots.take(self._mark(), self._notes)

    def wait(self) -> None:
        while self._pending:
            outcome = self._writer.outcome()
            if outcome is not None:
                assert not outcome.failure, outcome.failure
                self._pending = False
            time.sleep(0.001)

    def close(self) -> None:
        self._writer.close()
        self._snapshots.close(sweep=True)
        self._events.close()

    def _mark(self) -> Mark:
        return Mark(lineage=self._lineage, step=self.loop.state.step, position=self.loop.state.step)


class HoldfastEveryStep(Holdfast):
    """The same with a snapshot, fingerprints included, at every step."""

    every_step = True


class TorchSave(Undisturbed):
    """torch.save of the local shards on the training thread."""

    def save(self, directory: Path) -> None:
        directory.mkdir()
        torch.save(
            {name: tensor.cpu() for name, tensor in self.loop.local().items()}, directory / "rank-0.pt"
        )


class DcpSave(Undisturbed):
    """dcp.save on the training thread."""

    def save(self, directory: Path) -> None:
        dcp.save(dict(self.loop.state.tensors()), checkpoint_id=directory)


class DcpAsyncSave(Undisturbed):
    """dcp.async_save with its thread."""

    _future: Any = None

    def save(self, directory: Path) -> None:
        self.wait()
        self._future = dcp.async_save(dict(self.loop.state.tensors()), checkpoint_id=directory)

    def wait(self) -> None:
        if self._future is not None:
            self._future.result()
            self._future = None


class NvrxDcp(Undisturbed):
    """NVRx's FileSystemWriterAsync with its persistent worker, as its documentation shows it."""

    def __init__(self, loop: Loop, root: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncCallsQueue

        super().__init__(loop, root)
        self._queue = AsyncCallsQueue(persistent=True, cpu_shm_mode=loop.device.type != "cuda")

    def save(self, directory: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt import state_dict_saver as saver
        from nvidia_resiliency_ext.checkpointing.async_ckpt.core import AsyncRequest
        from nvidia_resiliency_ext.checkpointing.async_ckpt.filesystem_async import FileSystemWriterAsync

        self.wait()
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


class NvrxTorch(Undisturbed):
    """NVRx's TorchAsyncCheckpoint(persistent_queue=True); GPU only."""

    def __init__(self, loop: Loop, root: Path) -> None:
        from nvidia_resiliency_ext.checkpointing.async_ckpt.torch_ckpt import TorchAsyncCheckpoint

        super().__init__(loop, root)
        self._checkpoint = TorchAsyncCheckpoint(persistent_queue=True)

    def save(self, directory: Path) -> None:
        self.wait()
        directory.mkdir()
        self._checkpoint.async_save(self.loop.local(), directory / "rank-0.pt")

    def wait(self) -> None:
        self._checkpoint.finalize_async_save(blocking=True, no_dist=True)

    def close(self) -> None:
        self._checkpoint.close()


METHODS: dict[str, type[Undisturbed]] = {
    "none": Undisturbed,
    "holdfast": Holdfast,
    "holdfast_every_step": HoldfastEveryStep,
    "nvrx_dcp": NvrxDcp,
    "nvrx_torch": NvrxTorch,
    "dcp_async_save": DcpAsyncSave,
    "dcp_save": DcpSave,
    "torch_save": TorchSave,
}


def measure(name: str, loop: Loop, arguments: argparse.Namespace, baseline_seconds: float | None) -> Row:
    """Train a window with one writer."""
    with _directory(arguments.directory) as root:
        method = METHODS[name](loop, root)
        method.save(root / "step-warm-up")  # the first save pays for set-up
        for _ in range(3):
            loop.step(method.before_optimizer_step)
            method.after_step()
        method.wait()
        loop.wait()
        times, calls = [], []
        began = time.perf_counter()
        for number in range(arguments.steps):
            start = time.perf_counter()
            loop.step(method.before_optimizer_step)
            method.after_step()
            if number % arguments.every == 0:
                call = time.perf_counter()
                method.save(root / f"save-{number}")
                calls.append(time.perf_counter() - call)
            loop.wait()
            times.append(time.perf_counter() - start)
        window = time.perf_counter() - began
        drain = time.perf_counter()
        method.wait()
        drain_seconds = time.perf_counter() - drain
        method.close()
    median = statistics.median(times)
    undisturbed = baseline_seconds or median
    extra = window - arguments.steps * undisturbed
    return Row(
        writer=name,
        step_ms=median * 1e3,
        call_ms=statistics.median(calls) * 1e3,
        cost_per_save_ms=extra / len(calls) * 1e3,
        cost_in_steps=extra / len(calls) / undisturbed,
        window_percent=100 * extra / (arguments.steps * undisturbed),
        drain_seconds=drain_seconds,
        state_gb=sum(tensor.nbytes for tensor in loop.local().values()) / 1e9,
    )


@contextmanager
def _directory(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=20)
    parser.add_argument("--writers", default=",".join(METHODS), help="comma-separated; none comes first")
    parser.add_argument("--directory", type=Path, default=Path("runs/bench"))
    parser.add_argument("--output", type=Path, help="append JSON lines to this file")
    arguments = parser.parse_args()
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})
    os.environ["MASTER_PORT"] = str(environment.free_port())
    torch.set_num_threads(1)
    device = torch.device(arguments.device, 0) if arguments.device == "cuda" else torch.device("cpu")
    dist.init_process_group("cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo")
    loop = Loop(arguments, device)
    baseline: float | None = None
    with model.no_packed_sequence_check():
        for _ in range(5):
            loop.step(lambda: None)
        for name in arguments.writers.split(","):
            if name == "nvrx_torch" and device.type != "cuda":
                print("nvrx_torch needs a GPU: left out")  # noqa: T201
                continue
            row = measure(name, loop, arguments, baseline)
            baseline = baseline or row.step_ms / 1e3
            _show(row, arguments.output)
    dist.destroy_process_group()
    return 0


def _show(row: Row, output: Path | None) -> None:
    values = asdict(row)
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps({**values, "torch": torch.__version__}) + "\n")
    print("  ".join(f"{key}={v:.2f}" if isinstance(v, float) else f"{v:20}" for key, v in values.items()))  # noqa: T201


if __name__ == "__main__":
    sys.exit(main())
