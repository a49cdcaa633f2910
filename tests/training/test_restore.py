"""One restore over memory and storage, by real ranks that were killed: what is taken, and what is refused."""

from __future__ import annotations

import json
import os
import re
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import Ranks, run_ranks
from tests.tiny import replaced, step_losses, tiny_recipe, train_rank, train_rank_and_stand_still
from training import checkpoint_command, commit, environment, slots
from training.config import JobConfig
from training.events import read_events
from training.fingerprint import fingerprint, load_full, newest_checkpoint
from training.lineage import read_ancestry
from training.run_directory import read_run_id

STEPS = 12


def recipe(data: Path, *, every_steps: int = 5) -> JobConfig:
    return tiny_recipe(
        data,
        ranks=2,
        training={"steps": STEPS},
        checkpoint={"writer": "dcp_sync", "every_steps": every_steps},
    )


@pytest.fixture(scope="module")
def undisturbed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    run_dir = tmp_path_factory.mktemp("undisturbed")
    run_ranks(2, train_rank, recipe(data), run_dir)
    return run_dir


def kill_after(config: JobConfig, run_dir: Path, step: int) -> None:
    """SIGKILL both ranks after a step."""
    began = time.time()
    ranks = Ranks(2, train_rank_and_stand_still, config, run_dir, step)
    deadline = time.monotonic() + 60
    while last_step(run_dir, since=began) < step:
        assert time.monotonic() < deadline
        time.sleep(0.005)
    ranks.kill()


def last_step(run_dir: Path, *, since: float) -> int:
    steps = (event for event in read_events(run_dir) if event["event"] == "step" and event["time"] > since)
    return max((event["step"] for event in steps), default=0)


def events_of(run_dir: Path, name: str) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == name]


def final(run_dir: Path) -> str:
    return fingerprint(load_full(newest_checkpoint(run_dir)))


def test_a_killed_run_goes_on_from_memory_and_loses_no_step(
    data: Path, tmp_path: Path, undisturbed: Path
) -> None:
    kill_after(recipe(data), tmp_path, 7)
    run_ranks(2, train_rank, recipe(data), tmp_path)
    restored = events_of(tmp_path, "restored")
    assert {event["source"] for event in restored} == {"memory"}
    assert all(event["step"] >= 6 for event in restored)
    assert {"prepare", "inventory", "load", "lineage"} <= restored[0]["phases"].keys()
    # and nothing tells it from the run that was left in peace
    assert final(tmp_path) == final(undisturbed)
    assert step_losses(tmp_path) == step_losses(undisturbed)
    # and its memory is free again
    assert not list(slots.scan(read_run_id(tmp_path)))


def test_a_run_killed_after_its_last_step_saves_that_from_memory(data: Path, tmp_path: Path) -> None:
    # GIVEN a run whose last step is in memory alone
    config = recipe(data, every_steps=1000)
    kill_after(config, tmp_path, 4)
    ancestry, held = read_ancestry(tmp_path), slots.scan(read_run_id(tmp_path))
    by_shard: dict[int, set[int]] = {0: set(), 1: set()}
    for _, descriptor, mark in held:
        if mark is not None:
            by_shard[descriptor.shard].add(mark.step)
    last = max(by_shard[0] & by_shard[1])
    assert ancestry.live is not None and not commit.committed_checkpoints(tmp_path / "checkpoints")
    # WHEN it comes back, there is no step left to do
    run_ranks(2, train_rank, replaced(config, "training", steps=last), tmp_path)
    assert commit.verify(newest_checkpoint(tmp_path)).step == last
    assert (tmp_path / "DONE").exists()


def slot_paths(run_dir: Path) -> list[Path]:
    return [path for path, _, _ in slots.scan(read_run_id(run_dir))]


def flip_bits(run_dir: Path) -> None:
    for path in slot_paths(run_dir):
        with path.open("r+b") as file:
            file.seek(20_000)
            byte = file.read(1)
            file.seek(20_000)
            file.write(bytes([byte[0] ^ 1]))


def tear(run_dir: Path) -> None:
    for path in slot_paths(run_dir):
        with path.open("r+b") as file:
            file.write(b"\1" * 24)


def lose_a_shard(run_dir: Path) -> None:
    for path, descriptor, _ in slots.scan(read_run_id(run_dir)):
        if descriptor.shard == 1:
            path.unlink()


def make_stale(run_dir: Path) -> None:
    """Give the slots to a lineage that the run never had."""
    for path in slot_paths(run_dir):
        with path.open("r+b") as file:
            for offset in (0, 64):
                file.seek(offset)
                file.write((99).to_bytes(8, "little"))


def belong_to_another_run(run_dir: Path) -> None:
    for path in slot_paths(run_dir):
        raw = path.read_bytes()[:4096]
        with path.open("r+b") as file:
            file.write(raw.replace(read_run_id(run_dir).encode(), b"f" * 16))


def truncate(run_dir: Path) -> None:
    for path in slot_paths(run_dir):
        os.truncate(path, 8192)


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (flip_bits, "its fingerprint is not the recorded one"),
        (lose_a_shard, r"ranks \[1\] have no whole snapshot"),
        (make_stale, "the run has left lineage 0000000000000063"),
        (belong_to_another_run, "of another run"),
        (truncate, "is truncated"),
        (tear, ""),
    ],
)
def test_memory_that_is_damaged_is_refused_and_the_checkpoint_taken(
    data: Path, tmp_path: Path, undisturbed: Path, damage: Callable[[Path], None], reason: str
) -> None:
    kill_after(recipe(data), tmp_path, 7)
    damage(tmp_path)
    run_ranks(2, train_rank, recipe(data), tmp_path)
    assert {(event["source"], event["step"]) for event in events_of(tmp_path, "restored")} == {("durable", 5)}
    refused = [event["reason"] for event in events_of(tmp_path, "refused")]
    assert not reason or any(re.search(reason, text) for text in refused)
    assert final(tmp_path) == final(undisturbed)


def test_a_run_that_is_made_again_under_the_same_path_meets_no_old_state(data: Path, tmp_path: Path) -> None:
    run_dir = tmp_path / "run"
    kill_after(recipe(data, every_steps=100), run_dir, 4)
    run_dir.rename(tmp_path / "old")
    run_ranks(2, train_rank, recipe(data), run_dir)
    assert not events_of(run_dir, "restored")


def test_a_checkpoint_of_a_state_that_was_left_is_refused(data: Path, tmp_path: Path) -> None:
    config = recipe(data)
    kill_after(config, tmp_path, 11)
    # GIVEN a run that went back from step 10 to step 5, since the newer checkpoint was out of reach
    newest = commit.committed_path(tmp_path / "checkpoints", 10)
    newest.rename(tmp_path / "hidden")
    for path in slot_paths(tmp_path):
        path.unlink()
    kill_after(replaced(config, "checkpoint", every_steps=100), tmp_path, 6)
    for path in slot_paths(tmp_path):
        path.unlink()
    # WHEN the checkpoint turns up again
    (tmp_path / "hidden").rename(newest)
    run_ranks(2, train_rank, config, tmp_path)
    # THEN it is known to be of the line that was left
    refused = {event["source"]: event["reason"] for event in events_of(tmp_path, "refused")}
    assert "the run has left lineage" in refused[str(newest)]
    steps = [lineage.step for lineage in read_ancestry(tmp_path).lineages]
    assert steps == [0, 5, 5]


def test_snapshots_off_restores_from_checkpoints(data: Path, tmp_path: Path) -> None:
    config = replaced(recipe(data), "snapshot", every_steps=0)
    kill_after(config, tmp_path, 7)
    run_ranks(2, train_rank, config, tmp_path)
    assert {event["source"] for event in events_of(tmp_path, "restored")} == {"durable"}


def shown(capsys: pytest.CaptureFixture[str], *arguments: str) -> list[dict[str, Any]]:
    capsys.readouterr()
    checkpoint_command.main([*arguments, "--json"])
    rows: list[dict[str, Any]] = json.loads(capsys.readouterr().out)
    return rows


def test_command_explains_what_a_restart_would_do(
    data: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    kill_after(recipe(data), tmp_path, 7)
    chosen = [row for row in shown(capsys, "explain", str(tmp_path)) if "RESTORED" in row["verdict"]]
    assert [row["tier"] for row in chosen] == ["memory"]
    assert {row["tier"] for row in shown(capsys, "ls", str(tmp_path))} == {"memory", "durable"}
    assert [row["verdict"] for row in shown(capsys, "verify", str(tmp_path))] == ["whole"]
    run_ranks(2, train_rank, recipe(data), tmp_path)
    restored = {event["step"] for event in events_of(tmp_path, "restored")}
    assert restored == {chosen[0]["step"]}
    assert environment.shared_memory().exists()
