"""A tiny run for tests: recipe, token shards, and the functions that ranks execute."""

from __future__ import annotations

import dataclasses
import random
import time
from pathlib import Path
from typing import Any

from training import schema
from training.config import JobConfig
from training.events import read_events

VOCABULARY_TOKENS = 128
LENGTH_TOKENS = 32


MODEL_TOML = """[model.config]
model_type = "llama"
hidden_size = 64
intermediate_size = 128
num_hidden_layers = 2
num_attention_heads = 4
num_key_value_heads = 2
vocab_size = 128
"""


def tiny_recipe(data: Path, *, ranks: int = 1, **sections: dict[str, Any]) -> JobConfig:
    """Return a recipe of a two-layer Llama; `sections` override single fields."""
    recipe: dict[str, Any] = {
        "version": 1,
        "job": {"name": "tiny", "ranks_per_node": ranks},
        "model": {"config": llama_fields()},
        "data": {
            "path": str(data),
            "sequence_length_tokens": LENGTH_TOKENS,
            "global_batch_samples": 8,
        },
        "training": {"steps": 6, "device": "cpu", "log_every_steps": 100},
        "optimizer": {"learning_rate": 1e-3, "warmup_steps": 2},
        "checkpoint": {
            "writer": "dcp_sync",
            "every_steps": 2,
            "deadline_seconds": 120.0,
            "overlap": "wait",
        },
        "snapshot": {"every_steps": 1},
        "recovery": {"layers": "none", "group_timeout_seconds": 20.0},
    }
    for name, fields in sections.items():
        recipe[name] = {**recipe.get(name, {}), **fields}
    return schema.load(JobConfig, recipe)


def llama_fields(*, tied: bool = False) -> dict[str, Any]:
    return {
        "model_type": "llama",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": VOCABULARY_TOKENS,
        "max_position_embeddings": 256,
        "tie_word_embeddings": tied,
    }


def tiny_data(path: Path) -> Path:
    """Write training and validation shards of random tokens and return their directory."""
    from tests.training.token_files import write_shards

    generator = random.Random(0)
    for name, tokens in (("train", 20_000), ("validation", 4_000)):
        values = [generator.randrange(VOCABULARY_TOKENS) for _ in range(tokens)]
        write_shards(path / name, values, shard_tokens=5_000, vocabulary_tokens=VOCABULARY_TOKENS)
    return path


def train_rank(config: JobConfig, run_dir: Path) -> None:
    """Be one rank of a run."""
    from training.worker import Worker

    Worker(config, run_dir).run()


def train_rank_and_stand_still(config: JobConfig, run_dir: Path, last_step: int) -> None:
    """Be one rank of a run, to be killed in the step after `last_step`."""
    from training.faults import FaultPlan

    def in_step(self: FaultPlan, point: str, *, step: int) -> None:
        if (point, step) == ("backward", last_step + 1):
            time.sleep(600)

    FaultPlan.in_step = in_step  # type: ignore[method-assign]
    train_rank(config, run_dir)


def step_losses(run_dir: Path) -> dict[int, tuple[float, float]]:
    """Return {step: (loss, gradient norm)} of rank 0; the last occurrence of a step counts."""
    return {
        event["step"]: (event["loss"], event["gradient_norm"])
        for event in read_events(run_dir)
        if event["event"] == "metrics" and event.get("rank") == 0
    }


def replaced(recipe: JobConfig, section: str, /, **fields: Any) -> JobConfig:
    """Return the recipe with single fields changed."""
    changed = dataclasses.replace(getattr(recipe, section), **fields)
    return dataclasses.replace(recipe, **{section: changed})
