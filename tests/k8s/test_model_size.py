from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from k8s.model_size import parameter_count, state_bytes
from training.config import JobConfig, ModelConfig
from training.errors import ConfigError

TINY = {
    "model_type": "llama",
    "hidden_size": 64,
    "intermediate_size": 160,
    "num_hidden_layers": 3,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 300,
}


def with_model(recipe: JobConfig, **model: object) -> JobConfig:
    return dataclasses.replace(recipe, model=ModelConfig(**model))  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("source", "parameters"),
    [
        ("meta-llama/Llama-3.1-8B", 8_030_261_248),
        ("meta-llama/Llama-3.1-70B", 70_553_706_496),
        ("meta-llama/Llama-3.2-1B", 1_235_814_400),
        ("meta-llama/Llama-3.2-3B", 3_212_749_824),
    ],
)
def test_known_models_have_their_published_size(recipe: JobConfig, source: str, parameters: int) -> None:
    assert parameter_count(with_model(recipe, source=source)) == parameters


@pytest.mark.parametrize("tied", [True, False])
def test_agrees_with_transformers(recipe: JobConfig, tied: bool) -> None:
    import torch
    from transformers import LlamaConfig, LlamaForCausalLM

    config = {**TINY, "tie_word_embeddings": tied}
    with torch.device("meta"):
        model = LlamaForCausalLM(LlamaConfig(**{k: v for k, v in config.items() if k != "model_type"}))
    expected = sum(parameter.numel() for parameter in model.parameters())
    assert parameter_count(with_model(recipe, config=config)) == expected


def test_recipe_changes_a_known_model(recipe: JobConfig) -> None:
    half = with_model(recipe, source="meta-llama/Llama-3.1-8B", config={"num_hidden_layers": 16})
    assert parameter_count(half) < parameter_count(recipe)


def test_reads_a_model_directory(recipe: JobConfig, tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text(json.dumps(TINY))
    from_directory = with_model(recipe, source=str(tmp_path))
    assert parameter_count(from_directory) == parameter_count(with_model(recipe, config=TINY))


@pytest.mark.parametrize("model", [{"source": "someone/else"}, {"config": {"model_type": "mamba"}}])
def test_unknown_size_says_what_to_set(recipe: JobConfig, model: dict[str, object]) -> None:
    with pytest.raises(ConfigError, match=r"set kubernetes\.model_parameters"):
        parameter_count(with_model(recipe, **model))


def test_recipe_names_the_size_itself(recipe: JobConfig) -> None:
    named = dataclasses.replace(
        with_model(recipe, source="someone/else"),
        kubernetes=dataclasses.replace(recipe.kubernetes, model_parameters=1000),
    )
    assert state_bytes(named) == 12_000
