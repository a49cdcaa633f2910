"""A checkpoint is either whole and visible, or not there: also when the writer is killed at any point."""

from __future__ import annotations

import os
import signal
import sys
from pathlib import Path
from typing import Any

import pytest

from tests.ranks import RankFailed, Ranks
from training import commit
from training.commit import Manifest
from training.errors import CheckpointError
from training.lineage import Ancestry, Lineage, name_of

NOTHING_LEFT = Ancestry()
# what a writer does to the file system; each occurrence is a point at which it may be killed
_EVENTS = {"open", "os.rename", "os.remove", "os.rmdir", "os.mkdir", "shutil.rmtree"}


def write_partial(root: Path, step: int, lineage: str) -> Manifest:
    directory = commit.partial_path(root, step, lineage)
    directory.mkdir(parents=True)
    for name in ("__0_0.distcp", "__1_0.distcp"):
        (directory / name).write_bytes(f"{name} of {step} by {lineage}".encode() * 1000)
    files = commit.hash_files(directory, ["__0_0.distcp", "__1_0.distcp"])
    return Manifest(lineage=lineage, step=step, position=step * 8, world_size=2, format="dcp", files=files)


def commit_step(
    root: Path, step: int, *, lineage: str = "a", keep: int = 2, ancestry: Ancestry = NOTHING_LEFT
) -> Path:
    return commit.commit(root, write_partial(root, step, lineage), keep=keep, ancestry=ancestry)


def commit_and_die(root: Path, manifest: Manifest, point: int) -> None:
    """Commit, with SIGKILL at the `point`-th change of the file system."""
    seen = 0

    def hook(event: str, arguments: Any) -> None:
        nonlocal seen
        if event in _EVENTS:
            if seen == point:
                os.kill(os.getpid(), signal.SIGKILL)
            seen += 1

    sys.addaudithook(hook)
    commit.commit(root, manifest, keep=2, ancestry=NOTHING_LEFT)


def visible_steps(root: Path) -> list[int]:
    return [commit.step_of(path) for path in commit.committed_checkpoints(root)]


def test_every_kill_during_a_commit_leaves_whole_checkpoints(tmp_path: Path) -> None:
    point = survived = 0
    while True:
        # GIVEN two committed checkpoints, an orphan of another lineage, and a third about to be committed
        root = tmp_path / str(point)
        commit_step(root, 10)
        commit_step(root, 20)
        write_partial(root, 15, "orphan")
        manifest = write_partial(root, 30, "a")
        # WHEN the committer is killed at its n-th operation
        try:
            Ranks(1, commit_and_die, root, manifest, point).wait()
        except RankFailed as failure:
            assert "exit code -9" in str(failure)
            survived += 1
        else:
            break
        # THEN the newest is 20 or 30, and everything visible is whole
        steps = visible_steps(root)
        assert steps[0] in (20, 30)
        for path in commit.committed_checkpoints(root):
            commit.verify(path)
        # and a later commit cleans up
        commit_step(root, 40, lineage="b")
        assert visible_steps(root)[0] == 40
        leftovers = [path.name for path in root.iterdir() if path.name.startswith((".step", ".doomed"))]
        assert not leftovers
        point += 1
    assert survived >= 8


def test_retention_keeps_the_newest(tmp_path: Path) -> None:
    for step in (10, 20, 30, 100_000_000):
        commit_step(tmp_path, step, keep=2)
    assert visible_steps(tmp_path) == [100_000_000, 30]
    assert (tmp_path / "LATEST").read_text() == "step-100000000\n"


def test_states_that_the_run_has_left_push_no_live_one_out(tmp_path: Path) -> None:
    """GIVEN a run that went back from step 40 to step 20 WHEN it saves step 25 THEN 25 and 20 stay."""
    for step in (20, 30, 40):
        commit_step(tmp_path, step, lineage=name_of(1), keep=3)
    went_back = Ancestry(lineages=(Lineage(id=1), Lineage(id=2, parent=1, step=20)))
    commit_step(tmp_path, 25, lineage=name_of(2), keep=2, ancestry=went_back)
    assert visible_steps(tmp_path) == [25, 20]


def test_newer_checkpoints_of_another_run_push_no_own_one_out(tmp_path: Path) -> None:
    """GIVEN another run's checkpoints, of which an older one was restored THEN that and the new one stay."""
    for step in (50, 60, 70):
        commit_step(tmp_path, step, lineage=name_of(9), keep=3)
    began = Ancestry(lineages=(Lineage(id=1, parent=9, step=50),))
    commit_step(tmp_path, 55, lineage=name_of(1), keep=2, ancestry=began)
    assert visible_steps(tmp_path) == [55, 50]


def test_what_cannot_be_read_is_neither_counted_nor_removed(tmp_path: Path) -> None:
    for step in (10, 20):
        commit_step(tmp_path, step, keep=3)
    (tmp_path / "step-00000020" / commit.MANIFEST).unlink()
    for step in (30, 40, 50):
        commit_step(tmp_path, step, keep=2)
    assert visible_steps(tmp_path) == [50, 40, 20]


def test_the_same_step_may_be_committed_again_by_a_later_lineage(tmp_path: Path) -> None:
    commit_step(tmp_path, 10, lineage="a")
    path = commit_step(tmp_path, 10, lineage="b")
    assert commit.verify(path).lineage == "b"


def flip_bit(path: Path) -> None:
    raw = bytearray(path.read_bytes())
    raw[len(raw) // 2] ^= 1
    path.write_bytes(raw)


def truncate(path: Path) -> None:
    os.truncate(path, path.stat().st_size - 1)


def remove(path: Path) -> None:
    path.unlink()


@pytest.mark.parametrize(
    ("damage", "message"),
    [(flip_bit, "xxh3 differs"), (truncate, "bytes, the manifest says"), (remove, "is missing")],
)
def test_verify_names_the_damaged_file(tmp_path: Path, damage: Any, message: str) -> None:
    path = commit_step(tmp_path, 10)
    damage(path / "__1_0.distcp")
    with pytest.raises(CheckpointError, match=f"__1_0.distcp.*{message}"):
        commit.verify(path)


@pytest.mark.parametrize("text", ["", "[]", '{"version": 1}', '{"version": 2, "files": {}}'])
def test_unreadable_manifest_is_named(tmp_path: Path, text: str) -> None:
    path = commit_step(tmp_path, 10)
    (path / commit.MANIFEST).write_text(text)
    with pytest.raises(CheckpointError, match=r"manifest\.json"):
        commit.verify(path)


def test_ranks_share_the_hashing(tmp_path: Path) -> None:
    path = commit_step(tmp_path, 10)
    flip_bit(path / "__1_0.distcp")
    outcomes = []
    for part in range(2):
        try:
            commit.verify(path, part=part, parts=2)
        except CheckpointError:
            outcomes.append(part)
    assert outcomes == [1]
