"""Weights into a sharded model: deterministic initialisation, or a Hugging Face directory.

Every value depends on the seed and the module's name alone, so any number of ranks, and plain
transformers put through the same walk, start from the same bits.
"""

from __future__ import annotations

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor, distribute_tensor

from training.errors import CheckpointError, ConfigError


@torch.no_grad()
def initialize(model: nn.Module, *, seed: int, device: torch.device, buffers_only: bool = False) -> None:
    """Run the model's own `_init_weights` module by module on full tensors; keep this rank's slice.

    Never holds more than one module's own parameters unsharded. Modules with buffers run on every
    start: `to_empty` leaves garbage in non-persistent ones (rotary frequencies) and no checkpoint
    holds them.
    """
    seen: set[int] = set()
    devices = [device] if device.type == "cuda" else []
    with torch.random.fork_rng(devices=devices):
        for name, module, owner in _walk(model):
            parameters = {
                key: parameter
                for key, parameter in module._parameters.items()
                if parameter is not None and id(parameter) not in seen
            }
            seen.update(id(parameter) for parameter in parameters.values())
            has_buffers = any(buffer is not None for buffer in module._buffers.values())
            if has_buffers or (parameters and not buffers_only):
                torch.manual_seed(_module_seed(seed, name))
                _initialize_module(module, owner, parameters, device)


def load_pretrained(model: nn.Module, source: str) -> None:
    """Load a Hugging Face checkpoint; each rank reads only its slices.

    Args:
        model: Sharded model.
        source: Directory with safetensors files, or the name of a hub model.
    """
    import torch.distributed.checkpoint as dcp
    from torch.distributed.checkpoint import HuggingFaceStorageReader

    directory = _local_copy(source)
    _check_against_index(directory)
    state = {
        name: tensor
        for name, tensor in model.state_dict().items()
        if name not in getattr(model, "all_tied_weights_keys", {})
    }
    try:
        dcp.load(state, storage_reader=HuggingFaceStorageReader(str(directory)))
    except (RuntimeError, OSError, dcp.api.CheckpointException) as error:
        reason = str(error).splitlines()[0][:200]
        raise CheckpointError(f"model.source={source!r}: its weights cannot be loaded ({reason})") from error


def _walk(module: nn.Module, name: str = "", owner: Any = None) -> Iterator[tuple[str, nn.Module, Any]]:
    owner = module if hasattr(module, "_init_weights") else owner
    yield name, module, owner
    for key, child in module.named_children():
        yield from _walk(child, f"{name}.{key}" if name else key, owner)


def _initialize_module(
    module: nn.Module, owner: Any, parameters: dict[str, nn.Parameter], device: torch.device
) -> None:
    kept = dict(module._parameters)
    for key, parameter in parameters.items():
        full = torch.empty(parameter.shape, dtype=parameter.dtype, device=device)
        module._parameters[key] = nn.Parameter(full)
    try:
        owner._init_weights(module)
        values = {key: module._parameters[key] for key in parameters}
    finally:
        module._parameters.update(kept)
    for key, parameter in parameters.items():
        _copy_slice(values[key], parameter)


def _copy_slice(value: Tensor | None, parameter: nn.Parameter) -> None:
    assert value is not None
    data = parameter.detach()
    if not isinstance(data, DTensor):
        data.copy_(value)
        return
    placed = distribute_tensor(value.detach(), data.device_mesh, data.placements, src_data_rank=None)
    data.to_local().copy_(placed.to_local())


def _module_seed(seed: int, name: str) -> int:
    digest = hashlib.blake2b(f"{seed}/{name}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1


def _local_copy(source: str) -> Path:
    if Path(source).is_dir():
        return Path(source)
    from huggingface_hub import snapshot_download
    from huggingface_hub.errors import HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError

    try:
        return Path(snapshot_download(source, allow_patterns=["*.safetensors", "*.json"]))
    except (HfHubHTTPError, LocalEntryNotFoundError, RepositoryNotFoundError, OSError) as error:
        rule = f"is neither a directory nor a reachable hub model ({type(error).__name__})"
        raise ConfigError.of("model.source", source, rule, "give a local directory") from error


def _check_against_index(directory: Path) -> None:
    """Refuse files that the index does not name: the reader would merge every one that it finds."""
    present = {path.name for path in directory.glob("*.safetensors")}
    index = directory / "model.safetensors.index.json"
    expected = (
        set(json.loads(index.read_text())["weight_map"].values()) if index.exists() else {"model.safetensors"}
    )
    if present != expected:
        stale, missing = sorted(present - expected), sorted(expected - present)
        raise ConfigError.of(
            "model.source",
            str(directory),
            f"its weight files differ from its index (missing {missing}, not in the index {stale})",
            "download it again into an empty directory",
        )
