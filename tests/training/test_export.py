from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.ranks import run_ranks
from tests.tiny import llama_fields, tiny_recipe, train_rank
from training.errors import ConfigError
from training.export import main
from training.fingerprint import load_full, newest_checkpoint


@pytest.mark.parametrize("tied", [False, True])
def test_from_pretrained_gets_the_exact_weights(data: Path, tmp_path: Path, tied: bool) -> None:
    from transformers import AutoModelForCausalLM

    config = tiny_recipe(data, model={"config": llama_fields(tied=tied)}, training={"steps": 3})
    run_ranks(1, train_rank, config, tmp_path / "run")
    assert main([str(tmp_path / "run"), "--output", str(tmp_path / "hf"), "--dtype", "fp32"]) == 0
    model = AutoModelForCausalLM.from_pretrained(tmp_path / "hf", dtype=torch.float32)
    saved = load_full(newest_checkpoint(tmp_path / "run"), prefix="model.")
    parameters = dict(model.named_parameters())
    assert {f"model.{name}" for name in parameters} == saved.keys()
    assert all(torch.equal(saved[f"model.{name}"], value) for name, value in parameters.items())


def test_a_run_starts_from_exported_weights(data: Path, tmp_path: Path) -> None:
    config = tiny_recipe(data, ranks=1, training={"steps": 3})
    run_ranks(1, train_rank, config, tmp_path / "run")
    main([str(tmp_path / "run"), "--output", str(tmp_path / "hf"), "--dtype", "fp32"])
    model = {"source": str(tmp_path / "hf"), "weights": "pretrained", "config": {}}
    warm = tiny_recipe(
        data,
        ranks=2,
        model=model,
        training={"steps": 1},
        optimizer={"learning_rate": 0.0, "warmup_steps": 0},
    )
    run_ranks(2, train_rank, warm, tmp_path / "warm")
    before = load_full(newest_checkpoint(tmp_path / "run"), prefix="model.")
    after = load_full(newest_checkpoint(tmp_path / "warm"), prefix="model.")
    assert all(torch.equal(before[name], after[name]) for name in before)


def test_refuses_to_write_over_something(tmp_path: Path) -> None:
    (tmp_path / "out").mkdir()
    (tmp_path / "out" / "mine").write_text("")
    with pytest.raises(ConfigError, match=r"--output='.*out': is not empty"):
        main([str(tmp_path), "--output", str(tmp_path / "out")])


def test_refuses_a_directory_that_is_no_run(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="is no run directory"):
        main([str(tmp_path), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("text", ["{", "[]", "{}"])
def test_refuses_a_damaged_run(tmp_path: Path, text: str) -> None:
    (tmp_path / "run.json").write_text(text)
    with pytest.raises(ConfigError, match="is no run directory"):
        main([str(tmp_path), "--output", str(tmp_path / "out")])


@pytest.mark.parametrize("name", ["file", "file/below"])
def test_refuses_to_write_into_a_file(tmp_path: Path, name: str) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--output='.*': .*file is no directory that can be written"):
        main([str(tmp_path), "--output", str(tmp_path / name)])
