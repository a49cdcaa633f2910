"""Checkpoint to a Hugging Face directory: safetensors, config and tokenizer.

Runs on one machine without a process group and reads DCP directly, so it needs host memory for the
weights alone (8B: 32 GB in fp32, 16 GB in bf16).
"""

from __future__ import annotations

import argparse
import json
import logging
import os
import shutil
from pathlib import Path
from typing import Any

import torch

from training.config import ModelConfig
from training.errors import CheckpointError, ConfigError
from training.files import check_writable
from training.fingerprint import load_full, newest_checkpoint
from training.model import build_model, load_model_config

logger = logging.getLogger(__name__)

_PREFIX = "model."
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")
_DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}


def export(checkpoint: Path, config: ModelConfig, output: Path, *, dtype: torch.dtype) -> None:
    """Write the weights of a checkpoint so that `from_pretrained(output)` loads them.

    Raises:
        CheckpointError: The checkpoint is not whole, or does not hold this model.
    """
    loaded = load_full(checkpoint, prefix=_PREFIX)
    state = {name.removeprefix(_PREFIX): tensor.to(dtype) for name, tensor in loaded.items()}
    model: Any = build_model(load_model_config(config))
    tied = set(getattr(model, "all_tied_weights_keys", {}))
    expected = {name for name, _ in model.named_parameters()} - tied
    if expected - state.keys():
        raise CheckpointError(f"{checkpoint}: lacks {sorted(expected - state.keys())[:3]} of this model")
    model.config.dtype = dtype
    model.config.use_cache = True
    model.save_pretrained(output, state_dict=state)


def copy_tokenizer(source: Path, output: Path) -> bool:
    """Copy the tokenizer that made the data; return whether there was one (bytes have none)."""
    found = [source / name for name in _TOKENIZER_FILES if (source / name).exists()]
    for path in found:
        shutil.copy2(path, output / path.name)
    return bool(found)


def _model_of_run(run_dir: Path) -> tuple[ModelConfig, Path]:
    try:
        record = json.loads((run_dir / "run.json").read_text())
        fixed, data_path = record["fixed"], Path(record["data_path"])
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise ConfigError.of(
            "RUN_DIR", str(run_dir), f"is no run directory ({error})", "give one that holds run.json"
        ) from error
    return ModelConfig(source=fixed["model.source"], config=fixed["model.config"]), data_path


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="training export", description="Write a Hugging Face directory from a run's checkpoint."
    )
    parser.add_argument("run_dir", type=Path)
    parser.add_argument("--output", type=Path, required=True)
    parser.add_argument("--checkpoint", type=Path, help="default: the run's newest")
    parser.add_argument("--dtype", choices=sorted(_DTYPES), default="bf16")
    arguments = parser.parse_args(argv)
    output: Path = arguments.output
    check_writable(output, "--output")
    if output.exists() and any(output.iterdir()):
        raise ConfigError.of("--output", str(output), "is not empty", "give a new directory")
    model, data_path = _model_of_run(arguments.run_dir)
    checkpoint = arguments.checkpoint or newest_checkpoint(arguments.run_dir)
    # under another name until it is whole: an export that was killed can then be repeated
    partial = output.with_name(f".{output.name}.{os.getpid()}")
    partial.mkdir(parents=True)
    try:
        export(checkpoint, model, partial, dtype=_DTYPES[arguments.dtype])
        if not copy_tokenizer(data_path, partial):
            logger.warning("no tokenizer.json in %s: the export has weights and config only", data_path)
        partial.replace(output)
    finally:
        shutil.rmtree(partial, ignore_errors=True)
    logger.info("wrote %s from %s", output, checkpoint)
    return 0
