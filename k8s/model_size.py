"""How many parameters a model has, told from its configuration: no torch, no hub."""

from __future__ import annotations

import json
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from training.config import JobConfig
from training.errors import ConfigError

FP32_STATE_BYTES_PER_PARAMETER = 12  # fp32 weight and two fp32 Adam moments (training/state.py)

_KNOWN_CONFIGS: dict[str, dict[str, Any]] = {
    "meta-llama/Llama-3.1-8B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 4096,
        "intermediate_size": 14336,
        "num_hidden_layers": 32,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.1-70B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 8192,
        "intermediate_size": 28672,
        "num_hidden_layers": 80,
        "num_attention_heads": 64,
        "num_key_value_heads": 8,
        "tie_word_embeddings": False,
    },
    "meta-llama/Llama-3.2-1B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 2048,
        "intermediate_size": 8192,
        "num_hidden_layers": 16,
        "num_attention_heads": 32,
        "num_key_value_heads": 8,
        "head_dim": 64,
        "tie_word_embeddings": True,
    },
    "meta-llama/Llama-3.2-3B": {
        "model_type": "llama",
        "vocab_size": 128256,
        "hidden_size": 3072,
        "intermediate_size": 8192,
        "num_hidden_layers": 28,
        "num_attention_heads": 24,
        "num_key_value_heads": 8,
        "head_dim": 128,
        "tie_word_embeddings": True,
    },
}
_LLAMA_SHAPED = ("llama", "mistral")
_SIZES = ("vocab_size", "hidden_size", "intermediate_size", "num_hidden_layers", "num_attention_heads")


def parameter_count(recipe: JobConfig) -> int:
    """Return the number of parameters of the recipe's model.

    Raises:
        ConfigError: It can't be told from the recipe.
    """
    if recipe.kubernetes.model_parameters:
        return recipe.kubernetes.model_parameters
    config = _base_config(recipe.model.source) | recipe.model.config
    missing = [name for name in _SIZES if name not in config]
    if config.get("model_type") not in _LLAMA_SHAPED or missing:
        known = ", ".join(_KNOWN_CONFIGS)
        raise ConfigError.of(
            "model.source",
            recipe.model.source,
            f"size unknown here (known: {known}, and Llama-shaped model.config)",
            "set kubernetes.model_parameters to the number of parameters",
        )
    return llama_parameters(config)


def state_bytes(recipe: JobConfig) -> int:
    """Return the size of one copy of the whole training state: weights and Adam moments."""
    return parameter_count(recipe) * FP32_STATE_BYTES_PER_PARAMETER


def llama_parameters(config: Mapping[str, Any]) -> int:
    """Count the parameters of a Llama-shaped decoder from its configuration."""
    hidden, vocabulary = config["hidden_size"], config["vocab_size"]
    heads = config["num_attention_heads"]
    head_dim = config.get("head_dim") or hidden // heads
    key_value_heads = config.get("num_key_value_heads") or heads
    attention = 2 * hidden * head_dim * (heads + key_value_heads)
    feed_forward = 3 * hidden * config["intermediate_size"]
    layer = attention + feed_forward + 2 * hidden
    embeddings = vocabulary * hidden * (1 if config.get("tie_word_embeddings") else 2)
    return int(embeddings + config["num_hidden_layers"] * layer + hidden)


def _base_config(source: str) -> dict[str, Any]:
    if not source:
        return {}
    file = Path(source) / "config.json"
    if file.is_file():
        try:
            return dict(json.loads(file.read_text()))
        except ValueError as error:
            raise ConfigError.of(
                "model.source", source, f"has no valid config.json: {error}", "mend it"
            ) from error
    return _KNOWN_CONFIGS.get(source, {})
