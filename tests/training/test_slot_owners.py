"""Slots of a run stay as long as anybody may come back for them, and go when another run starts."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

import pytest

from training import environment, slot_owners

# argv: shared memory, directory of the shard, whether it is the keeper, whether it is the rank
PROCESS = """
import sys, time
from pathlib import Path
from training import slot_owners
memory, shard, parts = Path(sys.argv[1]), Path(sys.argv[2]), sys.argv[3]
if "keeper" in parts:
    print(slot_owners.keep(), flush=True)
if "rank" in parts:
    owner = slot_owners.Owner(shard)
    slot_owners.record_keeper(shard.parent)
    print("ready", flush=True)
time.sleep(600)
"""


@contextmanager
def process(memory: Path, shard: Path, parts: str, *, keeper: str = "") -> Iterator[str]:
    """Run a launcher, a rank or both until SIGKILL."""
    environ = {**os.environ, environment.SHARED_MEMORY: str(memory), environment.KEEPER: keeper}
    command = [sys.executable, "-c", PROCESS, str(memory), str(shard), parts]
    with subprocess.Popen(
        command, env=environ, stdout=subprocess.PIPE, text=True, cwd=Path(__file__).parents[2]
    ) as started:
        assert started.stdout is not None
        try:
            yield started.stdout.readline().strip()
        finally:
            started.kill()


@pytest.fixture
def memory(tmp_path: Path) -> Path:
    path = tmp_path / "memory"
    path.mkdir()
    return path


@pytest.fixture
def shard(memory: Path) -> Path:
    path = memory / "holdfast" / "run-a" / "node" / "shard-00000-of-00001.0"
    path.mkdir(parents=True)
    (path / "0.slot").write_bytes(b"state")
    return path


def swept(memory: Path, but: str = "run-b") -> list[Path]:
    return slot_owners.sweep_dead_runs(memory / "holdfast", but=but)


def test_slots_stay_while_the_launcher_or_a_rank_lives_and_then_go(memory: Path, shard: Path) -> None:
    with process(memory, shard, "keeper") as keeper:
        with process(memory, shard, "rank", keeper=keeper):
            assert not swept(memory)
        # the launcher will start the rank again
        assert not swept(memory)
        with process(memory, shard, "rank", keeper=keeper):
            pass
    # the run itself may be started again
    assert not swept(memory, but="run-a")
    assert swept(memory) == [shard.parent]
    assert not list((memory / "holdfast").iterdir())


def test_slots_stay_while_a_rank_has_outlived_its_launcher(memory: Path, shard: Path) -> None:
    with process(memory, shard, "keeper") as keeper:
        pass
    with process(memory, shard, "rank", keeper=keeper):
        assert not swept(memory)


def test_slots_of_ranks_without_a_launcher_are_left_alone(memory: Path, shard: Path) -> None:
    with process(memory, shard, "rank"):
        pass
    assert not swept(memory)
    assert (shard / "0.slot").exists()


def test_ranks_of_a_node_sweep_at_the_same_time(memory: Path) -> None:
    """GIVEN dead runs, which every rank of a new run finds THEN none fails because another was quicker."""
    for number in range(300):
        node = memory / "holdfast" / f"run-{number}" / "node"
        (node / "shard-00000-of-00001.0").mkdir(parents=True)
        (node / "keeper").write_text(str(memory / "gone"))
    program = "import sys; from pathlib import Path; from training.slot_owners import sweep_dead_runs;"
    program += "sys.stdin.read(); sweep_dead_runs(Path(sys.argv[1]), but='run-b')"
    command = [sys.executable, "-c", program, str(memory / "holdfast")]
    gate, opener = os.pipe()
    ranks = [subprocess.Popen(command, stdin=gate, cwd=Path(__file__).parents[2]) for _ in range(4)]
    os.close(gate)
    os.close(opener)
    assert [rank.wait(60) for rank in ranks] == [0, 0, 0, 0]
    assert not list((memory / "holdfast").iterdir())
