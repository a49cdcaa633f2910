"""The training loop that a writer disturbs: a Llama of transformers under FSDP2 on one rank."""

from __future__ import annotations

import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import init_device_mesh

from training import environment, model, weights
from training.config import ModelConfig, OptimizerConfig
from training.layout import local_tensors
from training.state import TrainState, make_state


@dataclass(frozen=True, kw_only=True, slots=True)
class Shape:
    """What is trained. The state has 12 bytes a parameter."""

    device: str
    width: int
    layers: int
    vocabulary: int
    length: int
    batch: int


class Loop:
    """Trains on random tokens; waits for nothing but its own compute stream."""

    def __init__(self, shape: Shape) -> None:
        self.device = _join(shape.device)
        self.mesh = init_device_mesh(self.device.type, (1,))
        config = ModelConfig(config=_llama(shape))
        task = model.LanguageModelTask(
            model.build_model(model.load_model_config(config)), loss_chunk_tokens=2048
        )
        model.shard(task, self.mesh, config, bf16=self.device.type == "cuda")
        task.to_empty(device=self.device)
        weights.initialize(task.model, seed=0, device=self.device)
        self.task = task
        self.state: TrainState = make_state(
            task.model, OptimizerConfig(learning_rate=1e-4), device=self.device
        )
        self._tokens = torch.randint(0, shape.vocabulary, (shape.batch, shape.length + 1), device=self.device)

    def step(self, before_optimizer_step: Callable[[], None] = lambda: None) -> None:
        self.forward_backward()
        before_optimizer_step()
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.state.step += 1

    def forward_backward(self) -> None:
        loss = self.task(self._tokens) / self._tokens.numel()
        loss.backward()

    def wait(self) -> None:
        """Wait for the compute stream alone: the copy stream's work is what may be hidden."""
        if self.device.type == "cuda":
            torch.cuda.current_stream().synchronize()

    def undisturbed_seconds(self, steps: int) -> float:
        """Return the median time of a step that nothing disturbs."""
        times = []
        for _ in range(steps):
            start = time.perf_counter()
            self.step()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)

    def local(self) -> dict[str, Tensor]:
        return local_tensors(self.state.tensors())

    @property
    def state_bytes(self) -> int:
        return sum(tensor.nbytes for tensor in self.local().values())


def _join(kind: str) -> torch.device:
    os.environ.update({"RANK": "0", "WORLD_SIZE": "1", "MASTER_ADDR": "127.0.0.1"})
    os.environ["MASTER_PORT"] = str(environment.free_port())
    torch.set_num_threads(1)
    if kind == "cuda":
        torch.cuda.set_device(0)
        torch.set_float32_matmul_precision("high")
    dist.init_process_group("cpu:gloo,cuda:nccl" if kind == "cuda" else "gloo")
    return torch.device("cuda", 0) if kind == "cuda" else torch.device("cpu")


def _llama(shape: Shape) -> dict[str, object]:
    heads = max(1, shape.width // 128)
    return {
        "model_type": "llama",
        "hidden_size": shape.width,
        "intermediate_size": 4 * shape.width,
        "num_hidden_layers": shape.layers,
        "num_attention_heads": heads,
        "num_key_value_heads": heads,
        "vocab_size": shape.vocabulary,
        "max_position_embeddings": shape.length,
    }
