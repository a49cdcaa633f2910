"""SIGKILL at every point of a snapshot, a copy, a drain, a commit and a restore.

After each, what is left is enough: a whole, verified state that is no older than it has to be, nothing
that blocks the next process, and no leftovers once that has done its work.
"""

from __future__ import annotations

import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.checkpoint import DefaultSavePlanner, FileSystemWriter

from tests.training.kill_points import every_point, in_child
from training import commit, copier, drain, environment, files, lineage, local_image, restore, slots, snapshot
from training.drain import Save, ShardPlan, ShardRequest
from training.events import EventLog
from training.exchange import Exchange
from training.layout import Layout, Place, make_layout
from training.lineage import Ancestry, Lineage
from training.local_image import CopyRequest
from training.restore import Restorer
from training.slots import Mark, Slot
from training.snapshot import Snapshots

pytestmark = pytest.mark.timeout(600)

RUN = "0123456789abcdef"
FIRST = Lineage(id=7)
NOTES = torch.zeros(slots.NOTES, dtype=torch.float64)
PLACE = Place(shard=0, shards=1)


def mark(step: int) -> Mark:
    return Mark(lineage=FIRST.id, step=step, position=step * 8)


def state(step: int) -> dict[str, Tensor]:
    return {
        "model.a": torch.full((64,), float(step)),
        "step": torch.tensor(step),
        "position": torch.tensor(step * 8),
    }


@contextmanager
def opened(run_dir: Path, tensors: dict[str, Tensor]) -> Iterator[tuple[Snapshots, EventLog]]:
    with EventLog(run_dir, role="rank", node="node", rank=0) as events:
        snapshots = Snapshots(
            count=4, ranks_per_node=1, device=torch.device("cpu"), events=events, node="node"
        )
        snapshots.prepare(RUN, tensors, PLACE)
        snapshots.set_up()
        yield snapshots, events
        snapshots.close(sweep=False)


def take(snapshots: Snapshots, tensors: dict[str, Tensor], step: int) -> None:
    for name, value in state(step).items():
        tensors[name].copy_(value)
    assert snapshots.take(mark(step), NOTES)


def make_run(root: Path) -> int:
    """Leave snapshots of steps 1 to 3 of a run in memory."""
    lineage.write_ancestry(root, Ancestry(lineages=(FIRST,)))
    tensors = state(0)
    with opened(root, tensors) as (snapshots, _):
        for step in (1, 2, 3):
            take(snapshots, tensors, step)
    return 0


@pytest.fixture
def run_dir(monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    """A run that is put back as it was by `fresh`."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-tests-") as root:
        path = Path(root, "run")
        monkeypatch.setenv(environment.SHARED_MEMORY, str(path / "memory"))
        (path / "memory").mkdir(parents=True)
        assert in_child(lambda: make_run(path)) == 0
        keep(path)
        yield path


def keep(run_dir: Path) -> None:
    """Take the run as it is for what `fresh` puts back."""
    shutil.copytree(run_dir, run_dir.with_name("template"), dirs_exist_ok=True)


def fresh(run_dir: Path) -> None:
    shutil.rmtree(run_dir)
    shutil.copytree(run_dir.with_name("template"), run_dir)


def whole_steps(run_dir: Path) -> set[int]:
    """Return the steps that a next process finds in memory, each loaded and verified."""
    tensors = state(0)
    with opened(run_dir, tensors) as (snapshots, _):
        found = {held.step: held for held in snapshots.inventory()}
        for step, held in found.items():
            snapshots.load(held)
            assert tensors["model.a"].tolist() == [float(step)] * 64
    return set(found)


def test_snapshot(run_dir: Path) -> None:
    def take_two(begin: Callable[[], None]) -> None:
        tensors = state(3)
        with opened(run_dir, tensors) as (snapshots, _):
            begin()
            take(snapshots, tensors, 4)
            take(snapshots, tensors, 5)

    points = 0
    for points in every_point(take_two, snapshot, copier, slots, below=run_dir):
        # THEN the two newest whole ones are there: whichever a rank that is a step behind holds in common
        steps = whole_steps(run_dir)
        assert {2, 3} <= steps or {3, 4} <= steps or {4, 5} <= steps, (points, steps)
        fresh(run_dir)
    assert points > 8


def layout_of(tensors: dict[str, Tensor]) -> Layout:
    return make_layout({name: tensors[name] for name in ("model.a",)}, PLACE)


def slot_path(run_dir: Path, step: int) -> Path:
    return next(path for path, _, held in slots.scan(RUN) if held is not None and held.step == step)


def save_request(run_dir: Path, step: int) -> ShardRequest:
    tensors = state(step)
    planner = DefaultSavePlanner()
    planner.set_up_planner(tensors, is_coordinator=True)
    plans, metadata = planner.create_global_plan([planner.create_local_plan()])
    plans = FileSystemWriter("").prepare_global_plan(plans)
    path = slot_path(run_dir, step)
    layout = layout_of(tensors)
    save = Save(run_dir=run_dir, mark=mark(step), world_size=1, keep=2, deadline=time.time() + 600)
    return ShardRequest(
        save=save,
        shard=0,
        slot_path=path,
        outcome_path=path.parent / "save.json",
        plan=ShardPlan(layout=layout, plan=plans[0], metadata=metadata).frozen(),
        node="node",
    )


def save_step(run_dir: Path, step: int) -> int:
    drain.drain(save_request(run_dir, step))
    return 0


def visible(run_dir: Path) -> list[int]:
    """Return the committed steps, all verified."""
    found = commit.committed_checkpoints(run_dir / "checkpoints")
    return [commit.verify(path).step for path in found]


def can_be_written(path: Path) -> bool:
    """Say whether no dead process keeps a slot pinned."""
    layout = layout_of(state(0))
    slot = Slot(path, layout)
    locked = slot.try_lock()
    slot.close()
    return locked


@pytest.mark.parametrize("existing", [(1, 2), (1, 2, 3)], ids=["a new step", "the same step again"])
def test_drain_and_commit(run_dir: Path, existing: tuple[int, ...]) -> None:
    for step in existing:
        assert in_child(partial(save_step, run_dir, step)) == 0
    keep(run_dir)
    before = visible(run_dir)
    assert before == sorted(existing, reverse=True)[:2]

    request = save_request(run_dir, 3)

    def save(begin: Callable[[], None]) -> None:
        begin()
        drain.drain(request)

    points = 0
    for points in every_point(save, drain, commit, files, lineage, below=run_dir):
        # THEN nothing that was visible has gone before the new one is visible
        steps = visible(run_dir)
        assert steps[:1] in (before[:1], [3]), (points, steps)
        assert len(steps) >= min(len(before), 2) and can_be_written(slot_path(run_dir, 3))
        # and the next save succeeds and clears up
        if points % 3 == 0:
            assert in_child(lambda: save_step(run_dir, 3)) == 0
            assert visible(run_dir)[0] == 3
            names = {path.name for path in (run_dir / "checkpoints").iterdir()}
            assert not [name for name in names if name.startswith((".step", ".doomed", ".replaced"))]
        fresh(run_dir)
    assert points > 20


def copy_request(run_dir: Path, step: int) -> CopyRequest:
    layout = layout_of(state(0))
    path = slot_path(run_dir, step)
    return CopyRequest(
        run_dir=run_dir,
        directory=run_dir / "disk",
        slot_path=path,
        outcome_path=path.parent / "copy.json",
        layout=layout,
        descriptor=slots.describe(RUN, layout),
        mark=mark(step),
        keep=2,
        deadline=time.time() + 600,
        node="node",
        rank=0,
    )


def copy_step(run_dir: Path, step: int) -> int:
    local_image.copy(copy_request(run_dir, step))
    return 0


def copied(run_dir: Path) -> list[int]:
    """Return the steps of the images that count as whole, all checked."""
    found = list(local_image.whole_images(run_dir / "disk"))
    for path, manifest in found:
        assert commit.hash_files(path.parent, [path.name])[path.name] == manifest.image
    return sorted(manifest.mark.step for _, manifest in found)


def test_local_copy(run_dir: Path) -> None:
    for step in (1, 2):
        assert in_child(partial(copy_step, run_dir, step)) == 0
    keep(run_dir)

    request = copy_request(run_dir, 3)

    def copy(begin: Callable[[], None]) -> None:
        begin()
        local_image.copy(request)

    points = 0
    for points in every_point(copy, local_image, files, below=run_dir):
        steps = copied(run_dir)
        assert {1, 2} <= set(steps) or {2, 3} <= set(steps), (points, steps)
        assert can_be_written(slot_path(run_dir, 3))
        if points % 3 == 0:
            assert in_child(lambda: copy_step(run_dir, 3)) == 0
            assert {path.name[:13] for path in (run_dir / "disk").iterdir()} == {
                "step-00000002",
                "step-00000003",
            }
        fresh(run_dir)
    assert points > 10


def restored_step(run_dir: Path, begin: Callable[[], None] = lambda: None) -> int:
    """Restore as a rank does that is alone; return the step."""
    dist.init_process_group("gloo", store=dist.HashStore(), rank=0, world_size=1)
    tensors = state(0)
    with opened(run_dir, tensors) as (snapshots, events):
        exchange = Exchange("restore", timeout_seconds=20)
        restorer = Restorer(run_dir, exchange=exchange, tiers={"memory": snapshots}, events=events)
        begin()
        restored = restorer.restore(tensors, restorer.begin())
    assert tensors["model.a"].tolist() == [float(restored.step)] * 64
    assert lineage.read_ancestry(run_dir).holds(restored.lineage, restored.step)
    return restored.step


def test_restore(run_dir: Path) -> None:
    # GIVEN a checkpoint and newer snapshots, the newest of a state that was left
    assert in_child(lambda: save_step(run_dir, 1)) == 0
    ancestry = Ancestry(lineages=(FIRST, Lineage(id=9, parent=FIRST.id, step=2)))
    lineage.write_ancestry(run_dir, ancestry)
    keep(run_dir)

    def restore_once(begin: Callable[[], None]) -> None:
        assert restored_step(run_dir, begin) == 2

    points = 0
    for points in every_point(restore_once, restore, lineage, snapshot, slots, files, below=run_dir):
        # THEN the next restore comes to the same state
        assert in_child(lambda: restored_step(run_dir)) == 2, points
        fresh(run_dir)
    assert points > 8
