"""Copies on the nodes' own disks, by real ranks that lose their memory: what is taken, what is refused."""

from __future__ import annotations

import json
import re
import shutil
import time
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest

from tests.ranks import RankFailed, Ranks, run_ranks
from tests.tiny import tiny_recipe, train_rank
from tests.training.test_checkpoint import wait_for
from tests.training.test_restore import events_of, shown, slot_paths
from training import commit, local_image
from training.config import JobConfig
from training.run_directory import read_run_id


def recipe(data: Path, disk: Path, *, steps: int = 1_000_000) -> JobConfig:
    return tiny_recipe(
        data,
        ranks=2,
        training={"steps": steps},
        checkpoint={
            "writer": "holdfast",
            "every_steps": 40,
            "overlap": "defer",
            "local": {"directory": str(disk), "every_steps": 5},
        },
    )


def restore_only(config: JobConfig, run_dir: Path) -> int:
    """Restore on one rank as a restart does, and stop there; return the step."""
    from training.restart import close_group, open_group
    from training.worker import Worker

    worker = Worker(config, run_dir)
    open_group(worker.device, iteration=0, config=config.recovery)
    trainer = worker.make_trainer()
    trainer.close()
    worker.close()
    close_group()
    return trainer.state.step


@pytest.fixture(scope="module")
def killed(data: Path, tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A run with a checkpoint and newer copies on its nodes' disks, whose nodes lost their memory."""
    root = tmp_path_factory.mktemp("killed")
    ranks = Ranks(2, train_rank, recipe(data, root / "disk"), root / "run")
    wait_for(root, "run/checkpoints/step-*", timeout_seconds=100)
    saved = commit.step_of(commit.committed_checkpoints(root / "run" / "checkpoints")[0])
    for shard in range(2):
        while not any(step > saved for step in copied_steps(root, shard)):
            time.sleep(0.05)
    ranks.kill()
    for path in slot_paths(root / "run"):
        path.unlink()
    return root


@pytest.fixture
def lost(killed: Path, tmp_path: Path) -> Iterator[Path]:
    shutil.copytree(killed, tmp_path / "lost")
    yield tmp_path / "lost"


def copied_steps(root: Path, shard: int) -> set[int]:
    run = read_run_id(root / "run")
    found = local_image.scan(root / "disk", run)
    return {manifest.mark.step for _, manifest in found if manifest.descriptor.shard == shard}


def images(root: Path) -> list[Path]:
    return [path for path, _ in local_image.scan(root / "disk", read_run_id(root / "run"))]


def restored_from(data: Path, root: Path) -> tuple[str, int]:
    steps = run_ranks(2, restore_only, recipe(data, root / "disk"), root / "run")
    restored = events_of(root / "run", "restored")[-2:]
    assert len({(event["source"], event["step"]) for event in restored}) == 1
    assert steps == [restored[0]["step"]] * 2
    return restored[0]["source"], restored[0]["step"]


def test_a_run_that_lost_its_memory_goes_on_from_the_nodes_disks(data: Path, lost: Path) -> None:
    common = max(copied_steps(lost, 0) & copied_steps(lost, 1))
    assert restored_from(data, lost) == ("local", common)
    # and its disks are empty again, since `close` ends the run
    assert not list((lost / "disk" / "holdfast").glob("*"))


def test_command_shows_the_copies(data: Path, lost: Path, capsys: pytest.CaptureFixture[str]) -> None:
    record = lost / "run" / "run.json"
    moved = json.loads(record.read_text()) | {"local_directory": str(lost / "disk")}
    record.write_text(json.dumps(moved))
    chosen = [row for row in shown(capsys, "explain", str(lost / "run")) if "RESTORED" in row["verdict"]]
    assert [row["tier"] for row in chosen] == ["local"]
    assert {row["tier"] for row in shown(capsys, "ls", str(lost / "run"))} == {"local", "durable"}


def lose_a_node(root: Path) -> None:
    for path in root.glob("disk/holdfast/*/*/shard-00001*"):
        shutil.rmtree(path)


def flip_bits(root: Path) -> None:
    for path in images(root):
        raw = bytearray(path.read_bytes())
        raw[20_000] ^= 1
        path.write_bytes(raw)


def truncate(root: Path) -> None:
    for path in images(root):
        path.write_bytes(path.read_bytes()[:8192])


def belong_to_another_run(root: Path) -> None:
    for path in images(root):
        manifest = path.parent / commit.MANIFEST
        manifest.write_text(manifest.read_text().replace(read_run_id(root / "run"), "f" * 16))


def tear(root: Path) -> None:
    for path in images(root):
        path.write_bytes(b"\1" * 24 + path.read_bytes()[24:])


def lose_manifests(root: Path) -> None:
    for path in images(root):
        (path.parent / commit.MANIFEST).unlink()


@pytest.mark.parametrize(
    ("damage", "reason"),
    [
        (lose_a_node, r"ranks \[1\] have no whole copy"),
        (flip_bits, "its fingerprint is not the recorded one"),
        (truncate, "is missing or truncated"),
        (belong_to_another_run, "is of another run or model"),
        (tear, "its marks are not those of its manifest"),
        (lose_manifests, ""),
    ],
)
def test_copies_that_are_lost_or_damaged_are_refused_and_the_checkpoint_taken(
    data: Path, lost: Path, damage: Callable[[Path], None], reason: str
) -> None:
    damage(lost)
    newest = commit.committed_checkpoints(lost / "run" / "checkpoints")[0]
    assert restored_from(data, lost) == ("durable", commit.step_of(newest))
    refused = [event["reason"] for event in events_of(lost / "run", "refused") if event["tier"] == "local"]
    assert not reason or any(re.search(reason, text) for text in refused)


def test_a_disk_that_fails_is_counted_and_checkpoints_are_written_from_memory(
    data: Path, tmp_path: Path
) -> None:
    ranks = Ranks(2, train_rank, recipe(data, tmp_path / "disk"), tmp_path)
    wait_for(tmp_path, "disk/holdfast/*/*/shard-00001*/step-*", timeout_seconds=100)
    # WHEN a file stands where a rank's copies went
    directory = next(tmp_path.glob("disk/holdfast/*/*/shard-00001*"))
    directory.rename(tmp_path / "gone")
    directory.write_text("")
    failed_at = failed_step(tmp_path)
    # THEN later checkpoints are made all the same
    while commit.step_of(newest := wait_for_checkpoint(tmp_path)) < failed_at:
        time.sleep(0.05)
    ranks.kill()
    assert commit.verify(newest).world_size == 2


def failed_step(run_dir: Path) -> int:
    while not (failed := [e for e in events_of(run_dir, "local_copy") if e["status"] == "failed"]):
        time.sleep(0.05)
    assert {event["rank"] for event in failed} == {1}
    return int(failed[0]["step"])


def wait_for_checkpoint(run_dir: Path) -> Path:
    wait_for(run_dir, "checkpoints/step-*")
    return commit.committed_checkpoints(run_dir / "checkpoints")[0]


def test_a_directory_that_cannot_be_made_stops_the_run_with_the_fix(data: Path, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(RankFailed, match="mount the node's disk there, or leave the setting empty"):
        run_ranks(2, train_rank, recipe(data, tmp_path / "file"), tmp_path / "run")
