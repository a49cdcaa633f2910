"""Initial weights are the same bits at any world size, and buffers are right after a restore."""

from __future__ import annotations

import hashlib
from pathlib import Path
from typing import Any

import pytest
import torch
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.tensor import DTensor

from tests.ranks import run_ranks
from tests.tiny import llama_fields
from training import model as models
from training import weights
from training.config import ModelConfig
from training.errors import ConfigError

CPU = torch.device("cpu")


def digest(model: Any) -> str:
    found = hashlib.sha256()
    for _, tensor in [*model.named_parameters(), *model.named_buffers()]:
        full = tensor.full_tensor() if isinstance(tensor, DTensor) else tensor
        found.update(full.detach().contiguous().view(torch.uint8).numpy().data)
    return found.hexdigest()


def sharded_digest(replicas: int) -> str:
    import torch.distributed as dist

    dist.init_process_group("gloo")
    world_size = dist.get_world_size()
    shape = (world_size,) if replicas == 1 else (replicas, world_size // replicas)
    names = ("replicate", "shard")[-len(shape) :]
    mesh = init_device_mesh("cpu", shape, mesh_dim_names=names)
    config = ModelConfig(config=llama_fields())
    task = models.LanguageModelTask(
        models.build_model(models.load_model_config(config)), loss_chunk_tokens=64
    )
    models.shard(task, mesh, config, bf16=False)
    task.to_empty(device=CPU)
    weights.initialize(task.model, seed=3, device=CPU)
    found = digest(task.model)
    dist.destroy_process_group()
    return found


def plain_digest() -> str:
    config = ModelConfig(config=llama_fields())
    model: Any = models.build_model(models.load_model_config(config)).to_empty(device=CPU)
    weights.initialize(model, seed=3, device=CPU)
    return digest(model)


@pytest.mark.parametrize(("ranks", "replicas"), [(1, 1), (2, 1), (4, 1), (4, 2)])
def test_initial_bits_do_not_depend_on_the_mesh(ranks: int, replicas: int) -> None:
    assert set(run_ranks(ranks, sharded_digest, replicas)) == {plain_digest()}


def test_buffers_alone_touch_no_rotary_garbage() -> None:
    config = ModelConfig(config=llama_fields())
    model: Any = models.build_model(models.load_model_config(config)).to_empty(device=CPU)
    for buffer in model.buffers():
        buffer.fill_(float("nan"))
    weights.initialize(model, seed=0, device=CPU, buffers_only=True)
    assert all(torch.isfinite(buffer).all() for buffer in model.buffers())


def test_tied_embeddings_stay_tied() -> None:
    config = ModelConfig(config=llama_fields(tied=True))
    model: Any = models.build_model(models.load_model_config(config)).to_empty(device=CPU)
    model.tie_weights()
    weights.initialize(model, seed=0, device=CPU)
    assert model.lm_head.weight is model.model.embed_tokens.weight


def test_files_that_the_index_does_not_name_are_refused(tmp_path: Path) -> None:
    (tmp_path / "model.safetensors").write_bytes(b"")
    (tmp_path / "stale-00001.safetensors").write_bytes(b"")
    with pytest.raises(ConfigError, match=r"not in the index \['stale-00001\.safetensors'\]"):
        weights.load_pretrained(torch.nn.Linear(1, 1), str(tmp_path))


@pytest.mark.parametrize(
    ("config", "message"),
    [
        (ModelConfig(source="./no/such/model"), "model.source='./no/such/model': is no model"),
        (ModelConfig(config={"model_type": "lama"}), "is no model that transformers can build"),
        (ModelConfig(config={"model_type": "vit"}), "is no causal language model"),
    ],
)
def test_unknown_models_are_named(config: ModelConfig, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        models.build_model(models.load_model_config(config))
    assert message in str(caught.value)
