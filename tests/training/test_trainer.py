"""The loop against plain transformers, and against itself at other world sizes and after resumes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
import torch.nn.functional as F

from k8s.progress import Progress
from tests.ranks import run_ranks
from tests.tiny import llama_fields, replaced, step_losses, tiny_recipe, train_rank
from training import weights
from training.config import JobConfig, OptimizerConfig
from training.data import BatchReader
from training.errors import ConfigError
from training.events import read_events
from training.fingerprint import fingerprint, load_full, newest_checkpoint
from training.schedule import learning_rate_at
from training.shards import TokenStore


def plain_transformers(config: JobConfig) -> dict[int, tuple[float, float]]:
    """Train the same recipe with transformers and torch alone; return loss and gradient norm by step."""
    from training.model import build_model, load_model_config

    model: Any = build_model(load_model_config(config.model)).to_empty(device="cpu")
    model.tie_weights()
    weights.initialize(model, seed=config.training.seed, device=torch.device("cpu"))
    model.train()
    decayed = [p for p in model.parameters() if p.dim() >= 2]
    rest = [p for p in model.parameters() if p.dim() < 2]
    groups: list[dict[str, Any]] = [{"params": decayed}, {"params": rest, "weight_decay": 0.0}]
    optimizer = torch.optim.AdamW(groups, lr=1e-3, betas=(0.9, 0.95), weight_decay=0.1)
    store = TokenStore(Path(config.data.path) / "train")
    trace: dict[int, tuple[float, float]] = {}
    with BatchReader(
        store,
        sequence_length_tokens=config.data.sequence_length_tokens,
        global_batch_samples=config.data.global_batch_samples,
        seed=config.training.seed,
        rank=0,
        world_size=1,
    ) as batches:
        for step in range(1, config.training.steps + 1):
            tokens = batches.at((step - 1) * config.data.global_batch_samples).tokens[0]
            logits = model(input_ids=tokens[:, :-1]).logits
            labels = tokens[:, 1:].reshape(-1)
            loss = F.cross_entropy(logits.reshape(len(labels), -1), labels, reduction="sum")
            (loss * (1 / len(labels))).backward()
            norm = torch.nn.utils.clip_grad_norm_(model.parameters(), 1.0)
            for group in optimizer.param_groups:
                group["lr"] = learning_rate_at(step, config.optimizer, config.training.steps)
            optimizer.step()
            optimizer.zero_grad()
            trace[step] = (loss.item() / len(labels), norm.item())
    return trace


@pytest.mark.parametrize("tied", [False, True])
@pytest.mark.parametrize(("ranks", "tolerance"), [(1, 0.0), (2, 2e-6), (4, 2e-6)])
def test_matches_plain_transformers(
    data: Path, tmp_path: Path, ranks: int, tolerance: float, tied: bool
) -> None:
    config = tiny_recipe(data, ranks=ranks, model={"config": llama_fields(tied=tied)})
    run_ranks(ranks, train_rank, config, tmp_path)
    expected, actual = plain_transformers(config), step_losses(tmp_path)
    assert actual.keys() == expected.keys()
    for step, (loss, norm) in expected.items():
        assert actual[step][0] == pytest.approx(loss, abs=tolerance, rel=0)
        assert actual[step][1] == pytest.approx(norm, rel=tolerance, abs=0)


def test_accumulation_and_chunked_loss_change_nothing_but_rounding(data: Path, tmp_path: Path) -> None:
    whole = tiny_recipe(data, ranks=2)
    parts = replaced(whole, "training", gradient_accumulation_steps=4)
    parts = replaced(parts, "model", loss_chunk_tokens=7)
    for name, config in (("whole", whole), ("parts", parts)):
        run_ranks(2, train_rank, config, tmp_path / name)
    expected = step_losses(tmp_path / "whole")
    for step, (loss, _) in step_losses(tmp_path / "parts").items():
        assert loss == pytest.approx(expected[step][0], abs=2e-6)


@pytest.mark.parametrize("mode", ["full", "selective"])
def test_activation_checkpointing_is_bitwise_neutral(data: Path, tmp_path: Path, mode: str) -> None:
    for name in ("none", mode):
        config = tiny_recipe(data, model={"config": llama_fields(), "activation_checkpointing": name})
        run_ranks(1, train_rank, config, tmp_path / name)
    assert step_losses(tmp_path / mode) == step_losses(tmp_path / "none")


def test_hsdp_matches_fsdp(data: Path, tmp_path: Path) -> None:
    config = tiny_recipe(data, ranks=4)
    for name, replicas in (("fsdp", 1), ("hsdp", 2)):
        run_ranks(4, train_rank, replaced(config, "job", replicas=replicas), tmp_path / name)
    expected = step_losses(tmp_path / "fsdp")
    for step, (loss, _) in step_losses(tmp_path / "hsdp").items():
        assert loss == pytest.approx(expected[step][0], abs=2e-6)


def test_evaluation_changes_nothing_in_training(data: Path, tmp_path: Path) -> None:
    plain = tiny_recipe(data, ranks=2)
    evaluated = replaced(plain, "training", evaluate_every_steps=1, evaluation_batches=2)
    for name, config in (("plain", plain), ("evaluated", evaluated)):
        run_ranks(2, train_rank, config, tmp_path / name)
    assert step_losses(tmp_path / "evaluated") == step_losses(tmp_path / "plain")


def final_fingerprint(run_dir: Path) -> str:
    return fingerprint(load_full(newest_checkpoint(run_dir)))


@pytest.mark.parametrize(("every_steps", "memory_step"), [(1, 6), (4, 4), (0, None)])
def test_status_shows_the_step_that_is_in_memory(
    data: Path, tmp_path: Path, every_steps: int, memory_step: int | None
) -> None:
    config = tiny_recipe(data, ranks=2, snapshot={"every_steps": every_steps})
    run_ranks(2, train_rank, config, tmp_path)
    progress = Progress(steps=6, pods=1)
    for event in read_events(tmp_path):
        progress.add(event)
    assert progress.status().memory_step == memory_step


@pytest.mark.parametrize("writer", ["holdfast", "dcp_sync"])
def test_resume_is_bitwise(data: Path, tmp_path: Path, writer: str) -> None:
    config = tiny_recipe(data, ranks=2, checkpoint={"writer": writer})
    run_ranks(2, train_rank, config, tmp_path / "whole")
    # GIVEN a run that has lost everything after step 4
    run_ranks(2, train_rank, config, tmp_path / "resumed")
    newest = newest_checkpoint(tmp_path / "resumed")
    newest.rename(tmp_path / "gone")
    (tmp_path / "resumed" / "DONE").unlink()
    # WHEN it is started again in new processes
    run_ranks(2, train_rank, config, tmp_path / "resumed")
    # THEN it ends with the same bits
    assert final_fingerprint(tmp_path / "resumed") == final_fingerprint(tmp_path / "whole")
    assert step_losses(tmp_path / "resumed") == step_losses(tmp_path / "whole")


@pytest.mark.parametrize(("before", "after"), [(2, 4), (4, 1)])
def test_resume_at_another_world_size(data: Path, tmp_path: Path, before: int, after: int) -> None:
    config = tiny_recipe(data, ranks=before, training={"steps": 20}, checkpoint={"every_steps": 10})
    run_ranks(before, train_rank, config, tmp_path / "whole")
    run_ranks(before, train_rank, config, tmp_path / "resized")
    newest_checkpoint(tmp_path / "resized").rename(tmp_path / "gone")
    (tmp_path / "resized" / "DONE").unlink()
    resized = replaced(config, "job", ranks_per_node=after)
    run_ranks(after, train_rank, resized, tmp_path / "resized")
    expected = step_losses(tmp_path / "whole")
    for step, (loss, _) in step_losses(tmp_path / "resized").items():
        assert loss == pytest.approx(expected[step][0], abs=5e-6)


def test_learning_rate_warms_up_and_decays_to_its_floor() -> None:
    config = OptimizerConfig(learning_rate=1.0, warmup_steps=10, final_learning_rate_ratio=0.1)
    assert learning_rate_at(1, config, 100) == pytest.approx(0.1)
    assert learning_rate_at(10, config, 100) == 1.0
    assert learning_rate_at(55, config, 100) == pytest.approx(0.55)
    assert learning_rate_at(100, config, 100) == pytest.approx(0.1)


def test_refuses_another_number_of_ranks(data: Path, tmp_path: Path) -> None:
    from training.worker import Worker

    with pytest.raises(ConfigError, match="WORLD_SIZE=1"):
        Worker(tiny_recipe(data, ranks=4), tmp_path)
