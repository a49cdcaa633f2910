"""The in-process layer over real ranks, on a store outside of them."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.ranks import Ranks, run_ranks
from tests.tiny import tiny_recipe
from tests.training import stores
from training import environment
from training.errors import ConfigError, RunError
from training.events import EventLog, read_events
from training.failures import SameStepError
from training.restart import Attempt, RankMonitor, close_group, open_group, run_restartable

CPU = torch.device("cpu")
RECOVERY = {
    "layers": "in_process",
    "group_timeout_seconds": 10.0,
    "soft_timeout_seconds": 15.0,
}


@pytest.fixture
def port() -> Any:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    yield store.port
    del store


class Rank:
    """Counts to `steps` in step with its peers; `fault` is called in each step."""

    def __init__(
        self,
        run_dir: Path,
        port: int,
        fault: Any,
        *,
        steps: int = 6,
        layers: str = "in_process",
        maximum_same_step_failures: int = 3,
        hard_timeout_seconds: float = 30.0,
    ) -> None:
        os.environ[environment.CONTROL] = f"127.0.0.1:{port}"
        self.rank, self.fault, self.steps = int(os.environ["RANK"]), fault, steps
        recovery = {
            **RECOVERY,
            "hard_timeout_seconds": hard_timeout_seconds,
            "barrier_timeout_seconds": 3 * hard_timeout_seconds,
            "layers": layers,
            "maximum_same_step_failures": maximum_same_step_failures,
        }
        self.run_dir = run_dir
        self.config = tiny_recipe(Path("unused"), ranks=2, recovery=recovery)
        self.events = EventLog(run_dir, role="rank", node="node-0", rank=self.rank)
        self.iterations: list[int] = []

    def run(self) -> list[int]:
        run_restartable(self.train, config=self.config, run_dir=self.run_dir, events=self.events, device=CPU)
        return self.iterations

    def train(self, attempt: Attempt) -> None:
        self.iterations.append(attempt.iteration)
        open_group(CPU, iteration=attempt.iteration, config=self.config.recovery)
        for step in range(1, self.steps + 1):
            self.fault(self.rank, attempt.iteration, step)
            dist.all_reduce(torch.ones(()))
            self.events.emit("step", step=step)
            attempt.ping()
        close_group()


def raise_twice(rank: int, iteration: int, step: int) -> None:
    if (rank, step) == (1, 4) and iteration < 2:
        raise ValueError(f"in iteration {iteration}")


def survive(run_dir: Path, port: int) -> list[int]:
    return Rank(run_dir, port, raise_twice).run()


def test_all_ranks_enter_again_in_the_same_process(tmp_path: Path, port: int) -> None:
    assert run_ranks(2, survive, tmp_path, port) == [[0, 1, 2]] * 2
    raised = [e for e in read_events(tmp_path) if e["event"] == "exception" and e["type"] == "ValueError"]
    assert [(e["rank"], e["message"]) for e in raised] == [(1, "in iteration 0"), (1, "in iteration 1")]
    entered = [(e["rank"], e["iteration"]) for e in read_events(tmp_path) if e["event"] == "reentry"]
    assert sorted(entered) == [(0, 1), (0, 2), (1, 1), (1, 2)]


def lose_the_store_and_raise(rank: int, iteration: int, step: int) -> None:
    if iteration:
        return
    if (rank, step) == (0, 2):
        os.kill(int(os.environ["STORE_PID"]), signal.SIGKILL)
        endpoint = environment.parse_endpoint(os.environ[environment.CONTROL])
        assert stores.until(lambda: not stores.listens(endpoint))
    if (rank, step) == (1, 5):
        raise ValueError("while the store is lost")


def outlive_the_store(run_dir: Path, port: int, pid: int) -> list[int]:
    os.environ["STORE_PID"] = str(pid)
    return Rank(run_dir, port, lose_the_store_and_raise, steps=8, hard_timeout_seconds=90.0).run()


def test_exception_while_the_store_is_lost_is_handled_when_it_is_back(tmp_path: Path) -> None:
    """GIVEN a store killed in step 2 THEN steps go on, and an exception waits for a store, a new one."""
    with stores.StoreProcess() as store:
        ranks = Ranks(2, outlive_the_store, tmp_path, store.port, store.pid)
        try:
            assert stores.until(lambda: "exception" in [event["event"] for event in read_events(tmp_path)])
            assert not store.is_alive()
            with stores.StoreProcess(port=store.port):
                assert ranks.wait() == [[0, 1]] * 2
        finally:
            ranks.kill()
    steps = [e["step"] for e in read_events(tmp_path) if e["event"] == "step" and e["rank"] == 0]
    assert steps == [1, 2, 3, 4, 1, 2, 3, 4, 5, 6, 7, 8]


def raise_at_once(rank: int, iteration: int, step: int) -> None:
    if rank == 1:
        raise ValueError("always")


def loop(run_dir: Path, port: int) -> str:
    try:
        Rank(run_dir, port, raise_at_once).run()
    except (RunError, SystemExit) as end:
        return type(end).__name__
    return "returned"


def test_restarts_that_finish_no_step_give_way_to_the_in_job_layer(tmp_path: Path, port: int) -> None:
    assert set(run_ranks(2, loop, tmp_path, port)) <= {"RunError", "SystemExit"}
    entered = [event["iteration"] for event in read_events(tmp_path) if event["event"] == "reentry"]
    assert max(entered) == 1


def raise_in_the_second_step(rank: int, iteration: int, step: int) -> None:
    if (rank, step) == (1, 2) and iteration < 3:
        raise ValueError("after one step")


def finish_one_step_each_time(run_dir: Path, port: int) -> list[int]:
    return Rank(run_dir, port, raise_in_the_second_step, maximum_same_step_failures=9).run()


def test_restart_that_finished_a_single_step_is_not_fruitless(tmp_path: Path, port: int) -> None:
    assert run_ranks(2, finish_one_step_each_time, tmp_path, port) == [[0, 1, 2, 3]] * 2


def raise_in_step_4(rank: int, iteration: int, step: int) -> None:
    if (rank, step) == (1, 4):
        raise ValueError(f"in iteration {iteration}")


def fail_in_the_same_step(run_dir: Path, port: int) -> tuple[list[int], str]:
    ranks = Rank(run_dir, port, raise_in_step_4)
    try:
        ranks.run()
    except (SameStepError, SystemExit) as end:
        return ranks.iterations, type(end).__name__
    return ranks.iterations, "returned"


def test_same_step_that_fails_three_times_ends_the_run_and_only_its_rank_is_blamed(
    tmp_path: Path, port: int
) -> None:
    survivor, cause = run_ranks(2, fail_in_the_same_step, tmp_path, port)
    assert cause == ([0, 1, 2], "SameStepError")
    assert survivor == ([0, 1, 2], "SystemExit")
    assert [path.name for path in (tmp_path / "failures").iterdir()] == ["rank-1.json"]


def refuse(rank: int, iteration: int, step: int) -> None:
    raise ConfigError.of("data.path", "x", "is missing", "make it")


def misconfigured(run_dir: Path, port: int) -> str:
    with pytest.raises(ConfigError) as caught:
        Rank(run_dir, port, refuse).run()
    return str(caught.value)


def test_configuration_error_is_not_retried(tmp_path: Path, port: int) -> None:
    assert run_ranks(2, misconfigured, tmp_path, port) == ["data.path='x': is missing; make it"] * 2
    assert not [event for event in read_events(tmp_path) if event["event"] == "reentry"]


def die(rank: int, iteration: int, step: int) -> None:
    if (rank, step) == (1, 3):
        os.kill(os.getpid(), signal.SIGKILL)


def outlive(run_dir: Path, port: int) -> int | str | None:
    with pytest.raises(SystemExit) as caught:
        Rank(run_dir, port, die).run()
    return caught.value.code


def test_dead_peer_makes_the_survivor_leave(tmp_path: Path, port: int) -> None:
    ranks = Ranks(2, outlive, tmp_path, port)
    try:
        assert ranks.processes[0].exitcode is None
        ranks.processes[0].join(60)
        ranks.processes[1].join(60)
        assert [process.exitcode for process in ranks.processes] == [0, -signal.SIGKILL]
    finally:
        ranks.kill()


def unprotected(run_dir: Path, port: int) -> list[int]:
    return Rank(run_dir, port, lambda *_: None, layers="none").run()


def test_layer_that_is_off_calls_the_function_once(tmp_path: Path, port: int) -> None:
    assert run_ranks(2, unprotected, tmp_path, port) == [[0], [0]]


def test_rank_without_ft_launcher_says_that_nobody_watches(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.delenv("FT_RANK_MONITOR_IPC_SOCKET", raising=False)
    monitor = RankMonitor()
    with monitor.section("setup"), monitor.section("step"):
        pass
    assert caplog.messages == ["no ft_launcher: hangs of this rank are not noticed by the in-job layer"]
