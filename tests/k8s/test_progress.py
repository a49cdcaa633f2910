from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k8s.progress import EventTail, Progress, RunStatus
from training.events import EventLog

START = 1_800_000_000.0


@pytest.fixture
def rank_0(tmp_path: Path) -> Iterator[EventLog]:
    with EventLog(tmp_path, role="rank", node="node-a", rank=0, round=0, iteration=0) as log:
        yield log


def step(log: EventLog, number: int, *, time: float, loss: float = 2.0) -> None:
    log.emit("step", time=time, step=number, start=time - 2, seconds=2.0, tokens=1000)
    log.emit("metrics", time=time, step=number, loss=loss, gradient_norm=1.0, learning_rate=1e-4)


def status_of(run_dir: Path, *, steps: int = 100, pods: int = 2) -> RunStatus:
    progress = Progress(steps=steps, pods=pods)
    for event in EventTail(run_dir).read():
        progress.add(event)
    return progress.status()


def test_speed_and_time_left(tmp_path: Path, rank_0: EventLog) -> None:
    for number in range(1, 41):
        step(rank_0, number, time=START + 2 * number, loss=3.0 - number / 40)
    status = status_of(tmp_path)
    assert status.step == 40
    assert status.loss == 2.0
    assert status.tokens_per_second == pytest.approx(500.0)
    assert status.eta_seconds == pytest.approx(120.0)


def test_speed_is_that_of_training_not_of_a_restart(tmp_path: Path, rank_0: EventLog) -> None:
    for number in (1, 2, 3):
        step(rank_0, number, time=START + number)
    rank_0.emit("reentry", time=START + 100)
    for number in (3, 4, 5):
        step(rank_0, number, time=START + 200 + number)
    assert status_of(tmp_path).tokens_per_second == pytest.approx(1000.0)


def test_step_goes_back_with_the_run(tmp_path: Path, rank_0: EventLog) -> None:
    step(rank_0, 9, time=START)
    rank_0.emit("enter", time=START + 1)
    step(rank_0, 5, time=START + 2)
    assert status_of(tmp_path).step == 5


def test_counts_restarts_by_layer_and_cause(tmp_path: Path, rank_0: EventLog) -> None:
    # GIVEN two nodes that start, an exception on both ranks, a killed rank, a new launcher and a new pod
    with (
        EventLog(tmp_path, role="rank", node="node-b", rank=1, round=0, iteration=0) as rank_1,
        EventLog(tmp_path, role="launcher", node="node-b") as launcher,
        EventLog(tmp_path, role="supervisor", node="node-b") as supervisor,
    ):
        for attempt, time in ((0, START), (0, START), (1, START + 50), (0, START + 60)):
            supervisor.emit("launch", time=time, attempt=attempt)
        for log in (rank_0, rank_1):
            log.emit("enter", time=START + 1, born=START)
            log.emit("exception", time=START + 2, type="RuntimeError", message="planned")
            log.emit("reentry", time=START + 3)
            log.emit("enter", time=START + 5, born=START + 4)
        launcher.emit("worker_exit", time=START + 4, rank=1, signal=9, exit_code=None, stopped=False)
        launcher.emit("worker_exit", time=START + 4, rank=0, signal=15, exit_code=None, stopped=True)
    # THEN each restart is counted once
    restarts = status_of(tmp_path).restarts
    assert (restarts.in_process, restarts.in_job, restarts.launcher, restarts.pod) == (1, 1, 1, 1)
    assert restarts.causes == {"RuntimeError": 1, "SIGKILL": 1}


def test_pods_of_a_job_that_resumes_are_no_restarts(tmp_path: Path) -> None:
    # GIVEN two nodes that are told to stop, and two pods of the next Job, one of which is made again
    def launch(node: str, time: float, *, until: float | None = None) -> None:
        with EventLog(tmp_path, role="supervisor", node=node) as supervisor:
            supervisor.emit("launch", time=time, attempt=0)
            if until is not None:
                supervisor.emit("exit", time=until, exit_code=143)

    with EventLog(tmp_path, role="rank", node="node-a", rank=0, round=0, iteration=0) as rank:
        for node in ("node-a", "node-b"):
            launch(node, START, until=START + 100)
        rank.emit("enter", time=START + 1)
        assert status_of(tmp_path).exit_code == 143
        launch("node-a", START + 200)
        launch("node-b", START + 200, until=START + 300)
        rank.emit("enter", time=START + 201)
        launch("node-c", START + 310)
    # THEN
    status = status_of(tmp_path)
    assert (status.restarts.in_job, status.restarts.pod, status.exit_code) == (0, 1, None)


def test_a_node_that_was_lost_does_not_keep_the_run_going(tmp_path: Path) -> None:
    """GIVEN a node that goes without an exit, its rank on the spare WHEN all others end THEN the run has."""
    names = ("node-a", "node-b", "spare")
    nodes = {name: EventLog(tmp_path, role="supervisor", node=name) for name in names}
    for log in nodes.values():
        log.emit("launch", time=START, attempt=0)
    with EventLog(
        tmp_path, role="supervisor", node="node-a", pid=1
    ) as killed:  # its pod was made again there
        killed.emit("launch", time=START - 1, attempt=0)
    enters = [(0, "node-a", 1.0), (1, "node-b", 1.0), (0, "node-a", 9.0), (1, "spare", 9.0)]
    for rank, node, seconds in enters:
        with EventLog(tmp_path, role="rank", node=node, rank=rank) as log:
            log.emit("enter", time=START + seconds)
    for name in ("node-a", "spare"):
        assert status_of(tmp_path).exit_code is None
        nodes[name].emit("exit", time=START + 20, exit_code=143)
    assert status_of(tmp_path).exit_code == 143
    for log in nodes.values():
        log.close()


def test_a_spare_that_has_no_rank_yet_keeps_the_run_going(tmp_path: Path) -> None:
    with EventLog(tmp_path, role="supervisor", node="spare") as spare:
        spare.emit("launch", time=START, attempt=0)
    with EventLog(tmp_path, role="supervisor", node="node-a") as node:
        node.emit("launch", time=START, attempt=0)
        with EventLog(tmp_path, role="rank", node="node-a", rank=0) as rank:
            rank.emit("enter", time=START + 1)
        node.emit("exit", time=START + 9, exit_code=75)
    assert status_of(tmp_path).exit_code is None


def test_a_restart_shows_the_step_that_it_begins_at(tmp_path: Path, rank_0: EventLog) -> None:
    step(rank_0, 9, time=START)
    rank_0.emit("checkpoint", time=START, step=9, status="snapshot")
    rank_0.emit("enter", time=START + 1)
    assert status_of(tmp_path).step == 9
    rank_0.emit("restored", time=START + 2, step=5, source="durable")
    status = status_of(tmp_path)
    assert (status.step, status.memory_step) == (5, None)
    rank_0.emit("restored", time=START + 3, step=5, source="memory")
    assert status_of(tmp_path).memory_step == 5


def test_a_signal_without_a_name_is_told_by_its_number(tmp_path: Path) -> None:
    with EventLog(tmp_path, role="launcher", node="node-b") as launcher:
        launcher.emit("worker_exit", time=START, rank=1, signal=40, exit_code=None, stopped=False)
    assert status_of(tmp_path).restarts.causes == {"signal 40": 1}


def test_knows_the_newest_checkpoints_and_places(tmp_path: Path, rank_0: EventLog) -> None:
    rank_0.emit("enter", time=START, born=START)
    rank_0.emit("checkpoint", time=START + 1, step=20, status="snapshot")
    with EventLog(tmp_path, role="writer", node="node-a", rank=0) as writer:
        writer.emit("checkpoint", time=START + 2, step=10, status="committed")
        writer.emit("checkpoint", time=START + 3, step=20, status="failed", reason="disk full")
    rank_0.emit("evaluation", time=START + 4, step=20, loss=1.5)
    rank_0.emit("done", time=START + 5, step=20)
    status = status_of(tmp_path)
    assert (status.durable_step, status.memory_step, status.evaluation_loss) == (10, 20, 1.5)
    assert status.ranks == {"0": "node-a"}
    assert status.done
    assert status.updated == START + 5


def test_counts_what_training_goes_on_from(tmp_path: Path, rank_0: EventLog) -> None:
    # GIVEN a save that two processes give up, another one, and two steps with NaN
    with EventLog(tmp_path, role="writer", node="node-a", rank=0) as writer:
        for log in (rank_0, writer):
            log.emit("checkpoint", step=10, status="failed", reason="disk full")
    rank_0.emit("checkpoint", step=20, status="failed", reason="late")
    for skipped in (1, 2):
        rank_0.emit("non_finite", step=20 + skipped, action="skip", skipped=skipped)
    # THEN
    status = status_of(tmp_path)
    assert (status.failed_saves, status.skipped_updates) == (2, 2)


def test_reads_each_event_once_and_waits_for_whole_lines(tmp_path: Path) -> None:
    events = tmp_path / "events"
    events.mkdir()
    tail = EventTail(tmp_path)
    assert tail.read() == []
    file = events / "rank-a-1.jsonl"
    line = json.dumps({"time": 1.0, "event": "done"})
    file.write_text(f"{line}\n{line[:10]}")
    assert len(tail.read()) == 1
    with file.open("a") as log:
        log.write(f"{line[10:]}\n")
    assert tail.read() == [{"time": 1.0, "event": "done"}]
    assert tail.read() == []


def test_a_run_without_events_is_at_step_0(tmp_path: Path) -> None:
    status: Any = status_of(tmp_path)
    assert (status.step, status.loss, status.eta_seconds, status.done) == (0, None, None, False)
