"""Launchers, spares included, over a real control store; their ranks only say what they are and wait."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.training.stores import until
from training import environment
from training.environment import free_port
from training.errors import EXIT_DONE
from training.processes import adopt_orphans, descendants, end_tree, reap_orphans

ROOT = Path(__file__).parents[2]
# argv: run directory. Leaves a file per start, and ends well once the file "end" is there.
RANK = """
import json, os, sys, time
from pathlib import Path
run_dir = Path(sys.argv[1])
seen = {name: os.environ[name] for name in ("RANK", "WORLD_SIZE", "HOLDFAST_NODE")}
path = run_dir / "ranks" / f"{os.environ['TORCHELASTIC_RESTART_COUNT']}-{seen['RANK']}.json"
path.with_suffix(".part").write_text(json.dumps({**seen, "pid": os.getpid()}))
path.with_suffix(".part").rename(path)
while not (run_dir / "end").exists():
    time.sleep(0.05)
(run_dir / "DONE").touch()
"""
# argv: recipe, run directory, the rank's program
NODE = """
import sys
from pathlib import Path
from training import launch
from training.config import load_recipe
recipe, run_dir, program = sys.argv[1:]
worker = [sys.executable, "-c", program, run_dir]
sys.exit(launch.launch(load_recipe(Path(recipe)), recipe=Path(recipe), run_dir=Path(run_dir), worker=worker))
"""
RECIPE = """
version = 1
[job]
name = "spares"
nodes = 2
ranks_per_node = 1
spares = 1
[model]
source = "unused"
[data]
path = "unused"
sequence_length_tokens = 32
global_batch_samples = 8
[training]
steps = 1
device = "cpu"
[recovery]
layers = "in_job"
setup_timeout_seconds = 600.0
step_timeout_seconds = 600.0
checkpoint_timeout_seconds = 600.0
out_of_section_timeout_seconds = 600.0
"""


class Cluster:
    """Control store and three nodes for a world of two."""

    def __init__(self, directory: Path) -> None:
        self.run_dir, self._recipe = directory / "run", directory / "recipe.toml"
        (self.run_dir / "ranks").mkdir(parents=True)
        self._recipe.write_text(RECIPE)
        self._port = free_port()
        options = ["--host", "127.0.0.1", "--port", str(self._port), "--linger-seconds", "2"]
        command = [sys.executable, "-m", "training", "control", str(self._recipe), *options]
        self.control = subprocess.Popen(command, cwd=ROOT)
        self.nodes = [self._start(index) for index in range(3)]

    def _start(self, index: int) -> subprocess.Popen[bytes]:
        environ = {
            **os.environ,
            environment.CONTROL: f"127.0.0.1:{self._port}",
            environment.NODE: f"node-{index}",
            environment.NODE_INDEX: str(index),
            # one for all, with which NVRx 0.7.0 would end the run
            environment.ADDRESS: "127.0.0.1",
            environment.WARM_WORKERS: "0",
        }
        command = [sys.executable, "-c", NODE, str(self._recipe), str(self.run_dir), RANK]
        return subprocess.Popen(command, cwd=ROOT, env=environ)

    def ranks(self, round_number: int) -> dict[int, dict[str, Any]]:
        """Wait for the two ranks of a round; return what they are, by rank."""
        paths = [self.run_dir / "ranks" / f"{round_number}-{rank}.json" for rank in range(2)]
        assert until(lambda: all(path.exists() for path in paths), seconds=100)
        return {rank: json.loads(path.read_text()) for rank, path in enumerate(paths)}

    def lose(self, node: int) -> None:
        self.nodes[node].send_signal(signal.SIGSTOP)
        end_tree(self.nodes[node].pid)
        self.nodes[node].wait()

    def end(self) -> list[int]:
        """Let the run end; return the exit codes of the nodes that are left, and the control's."""
        (self.run_dir / "end").touch()
        left = [node for node in self.nodes if node.returncode is None]
        return [process.wait(60) for process in (*left, self.control)]

    def close(self) -> None:
        for process in (*self.nodes, self.control):
            if process.poll() is None:
                process.send_signal(signal.SIGSTOP)
                end_tree(process.pid)
                process.wait()


@pytest.fixture
def cluster(tmp_path: Path) -> Iterator[Cluster]:
    adopt_orphans()
    before = below_us()
    cluster = Cluster(tmp_path)
    try:
        yield cluster
    finally:
        cluster.close()
    assert until(lambda: below_us() <= before)


def below_us() -> set[int]:
    reap_orphans()
    return set(descendants(os.getpid()))


def places(ranks: dict[int, dict[str, Any]]) -> dict[str, int]:
    return {seen["HOLDFAST_NODE"]: rank for rank, seen in ranks.items()}


def test_spare_takes_the_lost_nodes_rank_and_the_survivor_keeps_its_own(cluster: Cluster) -> None:
    """GIVEN 2 nodes and a spare WHEN one is lost THEN the run goes on, and its end ends all with 0."""
    before = places(cluster.ranks(0))
    lost, survivor = sorted(before)
    [spare] = {"node-0", "node-1", "node-2"} - set(before)
    cluster.lose(int(lost.removeprefix("node-")))
    after = places(cluster.ranks(1))
    assert after == {spare: before[lost], survivor: before[survivor]}
    assert cluster.end() == [EXIT_DONE] * 3


def test_spare_takes_nobodys_place_while_all_live(cluster: Cluster) -> None:
    """GIVEN a spare WHEN one rank, then the other dies THEN both nodes go on; the spare ends with 0."""
    before = cluster.ranks(0)
    os.kill(before[1]["pid"], signal.SIGKILL)
    assert places(cluster.ranks(1)) == places(before)
    os.kill(cluster.ranks(1)[0]["pid"], signal.SIGKILL)
    assert places(cluster.ranks(2)) == places(before)
    assert cluster.end() == [EXIT_DONE] * 4
