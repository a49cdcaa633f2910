"""Slots of one rank: what is found again, what is refused, what is never overwritten."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import pytest
import torch
from torch import Tensor

from tests.ranks import RankFailed, Ranks
from training import environment
from training.errors import CheckpointError, RunError
from training.events import EventLog, read_events
from training.layout import Place
from training.lineage import Ancestry, Lineage
from training.slots import Mark, Slot
from training.snapshot import Snapshots

RUN = "0123456789abcdef"
NOTES = torch.tensor([1.25, 2.5, 0.0], dtype=torch.float64)
PLACE = Place(shard=1, shards=2)
ANCESTRY = Ancestry(lineages=(Lineage(id=7),))


def mark(step: int, ancestry: Ancestry = ANCESTRY) -> Mark:
    assert ancestry.live is not None
    return Mark(lineage=ancestry.live.id, step=step, position=step * 8)


def state(step: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(step)
    return {
        "model.a": torch.randn(100, 7, generator=generator),
        "model.b": torch.randn(3, generator=generator),
        "step": torch.tensor(step),
        "position": torch.tensor(step * 8),
    }


def set_to(tensors: dict[str, Tensor], step: int) -> None:
    for name, value in state(step).items():
        tensors[name].copy_(value)


_logs: list[EventLog] = []


@pytest.fixture(autouse=True)
def memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Path]:
    path = tmp_path / "shm"
    path.mkdir()
    monkeypatch.setenv(environment.SHARED_MEMORY, str(path))
    yield path
    while _logs:
        _logs.pop().close()


def open_log(run_dir: Path) -> EventLog:
    _logs.append(EventLog(run_dir, role="rank", node="node", rank=0))
    return _logs[-1]


def open_snapshots(
    run_dir: Path,
    tensors: dict[str, Tensor],
    *,
    run: str = RUN,
    place: Place = PLACE,
    count: int = 4,
    kind: type[Snapshots] = Snapshots,
) -> Snapshots:
    events = open_log(run_dir)
    snapshots = kind(count=count, ranks_per_node=1, device=torch.device("cpu"), events=events, node="node")
    snapshots.prepare(run, tensors, place)
    return snapshots


def started(run_dir: Path, tensors: dict[str, Tensor]) -> Snapshots:
    snapshots = open_snapshots(run_dir, tensors)
    snapshots.set_up()
    return snapshots


def take(snapshots: Snapshots, tensors: dict[str, Tensor], *steps: int) -> None:
    for step in steps:
        set_to(tensors, step)
        assert snapshots.take(mark(step), NOTES)


def steps_in(snapshots: Snapshots) -> list[int]:
    return sorted(found.step for found in snapshots.inventory())


def train_and_die(run_dir: Path, memory: str) -> None:
    os.environ[environment.SHARED_MEMORY] = memory
    tensors = state(0)
    take(started(run_dir, tensors), tensors, 1, 2, 3, 4, 5)
    os.kill(os.getpid(), signal.SIGKILL)


def test_snapshots_outlive_the_process(tmp_path: Path, memory: Path) -> None:
    # GIVEN a process that was killed after its fifth snapshot
    with pytest.raises(RankFailed, match="exit code -9"):
        Ranks(1, train_and_die, tmp_path, str(memory)).wait()
    # WHEN another one looks for them
    tensors = state(0)
    snapshots = open_snapshots(tmp_path, tensors)
    assert steps_in(snapshots) == [2, 3, 4, 5]
    # THEN it can go back to each
    for step in (5, 3):
        assert snapshots.load(mark(step)) == [1.25, 2.5, 0.0]
        assert all(torch.equal(tensors[name], state(step)[name]) for name in ("model.a", "model.b"))


def test_the_oldest_is_overwritten(tmp_path: Path) -> None:
    tensors = state(0)
    snapshots = started(tmp_path, tensors)
    take(snapshots, tensors, *range(1, 8))
    assert steps_in(snapshots) == [4, 5, 6, 7]


class SlowlyLocked(Snapshots):
    """Snapshots whose slots can be used one after the other, as a GPU's while their pages are locked."""

    locked: set[Path]

    def _is_usable(self, slot: Slot) -> bool:
        return slot.path in self.locked


def test_the_first_snapshots_do_not_wait_for_all_slots(tmp_path: Path) -> None:
    # GIVEN a start whose slots become usable one by one
    tensors = state(0)
    snapshots = open_snapshots(tmp_path, tensors, kind=SlowlyLocked)
    assert isinstance(snapshots, SlowlyLocked)
    snapshots.locked = set()
    snapshots.set_up()
    assert not snapshots.has_room()
    # THEN each takes a snapshot as soon as it is there, and no snapshot is lost for want of the next
    for step, slot in enumerate(list(snapshots._slots)[:3], start=1):
        snapshots.locked.add(slot.path)
        assert snapshots.has_room() and not snapshots.ready()
        take(snapshots, tensors, step)
        assert snapshots.has_room() == (step == 3)
    assert steps_in(snapshots) == [1, 2, 3]
    # AND with three of four they roll
    take(snapshots, tensors, 4, 5)
    assert steps_in(snapshots) == [3, 4, 5]


def test_after_a_restart_one_slot_more_is_enough(tmp_path: Path) -> None:
    # GIVEN slots of a killed process, of which the one that was loaded is usable
    tensors = state(0)
    take(started(tmp_path, tensors), tensors, 1, 2, 3, 4)
    snapshots = open_snapshots(tmp_path, tensors, kind=SlowlyLocked)
    assert isinstance(snapshots, SlowlyLocked)
    oldest_first = sorted(snapshots._slots, key=lambda slot: slot.complete_mark().step)
    snapshots.locked = {oldest_first[-1].path}
    snapshots.set_up()
    assert not snapshots.has_room()
    # WHEN the next one is THEN it is the one that may be overwritten
    snapshots.locked.add(oldest_first[0].path)
    take(snapshots, tensors, 5)
    assert steps_in(snapshots) == [2, 3, 4, 5]
    assert not snapshots.has_room()


def test_a_held_snapshot_stays_and_the_others_roll(tmp_path: Path) -> None:
    tensors = state(0)
    snapshots = started(tmp_path, tensors)
    take(snapshots, tensors, 1, 2)
    path = snapshots.hold(mark(2), NOTES)
    assert path is not None
    take(snapshots, tensors, *range(3, 9))
    assert steps_in(snapshots) == [2, 6, 7, 8]
    snapshots.release(path)
    take(snapshots, tensors, 9, 10)
    assert steps_in(snapshots) == [7, 8, 9, 10]


def test_a_pinned_slot_is_never_overwritten_but_the_snapshot_skipped(tmp_path: Path) -> None:
    tensors = state(0)
    snapshots = started(tmp_path, tensors)
    take(snapshots, tensors, 1, 2, 3, 4)
    # GIVEN readers of the two oldest
    readers = [Slot(snapshots.directory / f"{number}.slot", snapshots.layout) for number in (0, 1)]
    for reader in readers:
        reader.pin()
    # THEN the two newest are not sacrificed for a third
    assert not snapshots.take(mark(5), NOTES)
    assert steps_in(snapshots) == [1, 2, 3, 4]
    assert snapshots.skipped == 1
    assert [event["step"] for event in read_events(tmp_path) if event["event"] == "snapshot"] == [5]
    # and a reader that ends makes room
    readers[0].close()
    take(snapshots, tensors, 6)
    assert steps_in(snapshots) == [2, 3, 4, 6]


def test_cannot_read_a_slot_that_is_being_written(tmp_path: Path) -> None:
    tensors = state(0)
    snapshots = started(tmp_path, tensors)
    path = snapshots.directory / "0.slot"
    writer, reader = Slot(path, snapshots.layout), Slot(path, snapshots.layout)
    assert writer.try_lock()
    with pytest.raises(CheckpointError, match="is being written"):
        reader.pin()


def flip_bit(slot: Slot) -> None:
    slot.view(slot.layout.pieces[0]).view(torch.int32)[1, 1] ^= 1


def exchange_pages(slot: Slot) -> None:
    data = slot.buffer[8192:10240]
    data.copy_(data.roll(1024))


@pytest.mark.parametrize("damage", [flip_bit, exchange_pages])
def test_damage_is_noticed_at_the_load(tmp_path: Path, damage: Callable[[Slot], None]) -> None:
    tensors = state(0)
    snapshots = started(tmp_path, tensors)
    take(snapshots, tensors, 1)
    damage(Slot(snapshots.directory / "0.slot", snapshots.layout))
    with pytest.raises(CheckpointError, match=r"0\.slot: model\.a: its fingerprint is not"):
        snapshots.load(mark(1))


def tear(slot: Slot) -> None:
    slot.write_begin(torch.tensor(mark(9).words()))


def empty(slot: Slot) -> None:
    slot.invalidate()


def truncate(slot: Slot) -> None:
    os.truncate(slot.path, 4096)


def remove(slot: Slot) -> None:
    slot.path.unlink()


def other_version(slot: Slot) -> None:
    slot.buffer[128:256] = 0


@pytest.mark.parametrize("damage", [tear, empty, truncate, remove, other_version])
def test_what_is_no_whole_snapshot_is_not_offered(tmp_path: Path, damage: Callable[[Slot], None]) -> None:
    tensors = state(0)
    snapshots = started(tmp_path, tensors)
    take(snapshots, tensors, 1, 2, 3)
    path = snapshots.directory / "1.slot"
    layout = snapshots.layout
    snapshots.close(sweep=False)
    damage(Slot(path, layout))
    again = open_snapshots(tmp_path, state(0))
    assert steps_in(again) == [1, 3]
    # and set-up mends it
    again.set_up()
    take(again, tensors, 4, 5)
    assert set(steps_in(again)) >= {4, 5}


def test_another_run_never_meets_the_slots(tmp_path: Path) -> None:
    tensors = state(0)
    take(started(tmp_path, tensors), tensors, 1)
    assert steps_in(open_snapshots(tmp_path, tensors, run="f" * 16)) == []


@pytest.mark.parametrize("place", [Place(shard=0, shards=2), Place(shard=1, shards=3)])
def test_another_shard_never_meets_the_slots(tmp_path: Path, place: Place) -> None:
    tensors = state(0)
    take(started(tmp_path, tensors), tensors, 1)
    assert steps_in(open_snapshots(tmp_path, tensors, place=place)) == []


def test_another_model_never_meets_the_slots(tmp_path: Path) -> None:
    tensors = state(0)
    take(started(tmp_path, tensors), tensors, 1)
    wider = {**state(0), "model.b": torch.zeros(4)}
    assert steps_in(open_snapshots(tmp_path, wider)) == []
    refused = [event for event in read_events(tmp_path) if event["event"] == "refused"]
    assert "another run or model" in refused[0]["reason"]


def test_an_hsdp_copy_on_the_same_node_is_as_good(tmp_path: Path) -> None:
    tensors = state(0)
    take(started(tmp_path, tensors), tensors, 1)
    copy = open_snapshots(tmp_path, tensors, place=Place(shard=1, shards=2, replica=1))
    assert steps_in(copy) == [1]
    set_to(tensors, 0)
    copy.load(mark(1))
    assert torch.equal(tensors["model.a"], state(1)["model.a"])


def test_states_that_the_run_has_left_are_forgotten(tmp_path: Path) -> None:
    tensors = state(0)
    snapshots = started(tmp_path, tensors)
    take(snapshots, tensors, 1, 2, 3, 4)
    parent = mark(1).lineage
    snapshots.forget_dead(ANCESTRY.branch(parent=parent, step=2))
    assert steps_in(snapshots) == [1, 2]


def test_the_end_of_the_run_frees_the_memory(tmp_path: Path, memory: Path) -> None:
    tensors = state(0)
    snapshots = started(tmp_path, tensors)
    take(snapshots, tensors, 1)
    snapshots.close(sweep=True)
    assert not list((memory / "holdfast").iterdir())


def test_slots_are_really_allocated(tmp_path: Path) -> None:
    snapshots = started(tmp_path, state(0))
    for path in snapshots.directory.glob("*.slot"):
        assert path.stat().st_blocks * 512 >= snapshots.layout.size_bytes


def test_too_little_memory_is_said_before_anything_is_allocated(tmp_path: Path, memory: Path) -> None:
    events = open_log(tmp_path)
    snapshots = Snapshots(
        count=4, ranks_per_node=1 << 40, device=torch.device("cpu"), events=events, node="node"
    )
    with pytest.raises(RunError, match=r"4 snapshot slots still need .* give the pod a larger /dev/shm"):
        snapshots.prepare(RUN, state(0), PLACE)
    assert not list(memory.rglob("*.slot"))


def test_a_scattered_shard_is_refused(tmp_path: Path) -> None:
    with pytest.raises(RunError, match=r"model\.a: its shard is not contiguous"):
        open_snapshots(tmp_path, {"model.a": torch.zeros(4, 4).t()[1:]})
