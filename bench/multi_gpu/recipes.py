"""Recipes of the models that are measured: the shapes of Llama 3.2 1B and Llama 3.1 8B, random weights."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROPE = {
    "rope_type": "llama3",
    "rope_theta": 500000.0,
    "factor": 8.0,
    "low_freq_factor": 1.0,
    "high_freq_factor": 4.0,
    "original_max_position_embeddings": 8192,
}
_LARGE = {
    "model_type": "llama",
    "vocab_size": 128256,
    "max_position_embeddings": 131072,
    "rms_norm_eps": 1e-5,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "rope_parameters": _ROPE,
}
_8B = {
    **_LARGE,
    "hidden_size": 4096,
    "intermediate_size": 14336,
    "num_hidden_layers": 32,
    "tie_word_embeddings": False,
}
MODELS: dict[str, dict[str, Any]] = {
    "1b": {
        **_LARGE,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "8b": _8B,
    "8b/8": {**_8B, "num_hidden_layers": 8},  # a quarter of the depth: fits one GPU with its state
    "155m": {
        **_LARGE,
        "vocab_size": 32000,
        "hidden_size": 1024,
        "intermediate_size": 4096,
        "num_hidden_layers": 8,
        "num_attention_heads": 16,
        "num_key_value_heads": 4,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "tiny": {
        "model_type": "llama",
        "vocab_size": 257,
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "max_position_embeddings": 256,
        "tie_word_embeddings": False,
    },
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Workload:
    """A model and how much of it a rank computes in a step."""

    model: str
    sequence_length_tokens: int
    samples_per_rank: int
    activation_checkpointing: str = "none"

    @property
    def name(self) -> str:
        extra = "" if self.activation_checkpointing == "none" else f" {self.activation_checkpointing} AC"
        return f"{self.model} {self.samples_per_rank}x{self.sequence_length_tokens}{extra}"


def recipe(
    workload: Workload, *, name: str, data: Path, nodes: int, ranks_per_node: int, device: str, **tables: Any
) -> dict[str, Any]:
    """Return a recipe as nested tables.

    Args:
        workload: What to train.
        name: Name of the job.
        data: Token shards.
        nodes: Nodes, or simulated nodes.
        ranks_per_node: Ranks of each.
        device: `cuda` or `cpu`.
        tables: Fields that are added to, or replace, those of a table.
    """
    on_gpu = device == "cuda"
    base: dict[str, Any] = {
        "version": 1,
        "job": {"name": name, "nodes": nodes, "ranks_per_node": ranks_per_node},
        "model": {
            "config": MODELS[workload.model],
            "compile": on_gpu,
            "activation_checkpointing": workload.activation_checkpointing,
        },
        "data": {
            "path": str(data),
            "sequence_length_tokens": workload.sequence_length_tokens,
            "global_batch_samples": workload.samples_per_rank * nodes * ranks_per_node,
        },
        "training": {"steps": 100_000, "device": device, "log_every_steps": 20},
        "optimizer": {"learning_rate": 1e-4, "warmup_steps": 5},
        "checkpoint": {"every_steps": 1_000_000, "deadline_seconds": 300.0},
        "recovery": {} if on_gpu else {"group_timeout_seconds": 20.0},
    }
    for table, fields in tables.items():
        base[table] = {**base.get(table, {}), **fields}
    return base


def write(path: Path, tables: Mapping[str, Any]) -> Path:
    """Write nested tables as TOML."""
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text("\n".join(_table("", tables)) + "\n")
    return path


def _table(prefix: str, fields: Mapping[str, Any]) -> list[str]:
    """Return the lines of a table: first its values, then the tables in it."""
    nested = {name: value for name, value in fields.items() if isinstance(value, Mapping)}
    lines = [f"[{prefix}]"] if prefix else []
    for name, value in fields.items():
        if name not in nested:
            lines.append(f"{name} = {_value(value)}")
    for name, value in nested.items():
        lines.extend(_table(f"{prefix}.{name}" if prefix else name, value))
    return lines


def _value(value: Any) -> str:
    if isinstance(value, Mapping):
        return "{ " + ", ".join(f"{name} = {_value(inner)}" for name, inner in value.items()) + " }"
    if isinstance(value, list | tuple):
        return "[" + ", ".join(_value(inner) for inner in value) + "]"
    return json.dumps(value)
