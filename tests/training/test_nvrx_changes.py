"""Each change beside what NVRx does without it."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvidia_resiliency_ext.fault_tolerance import launcher, rank_monitor_server, utils

from training import nvrx_changes
from training.events import EventLog, read_events


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """Give the changed agent an event log, as `apply_to_launcher` does."""
    with EventLog(tmp_path, role="launcher", node="node-0") as events:
        nvrx_changes.Agent.events = events
        yield tmp_path


@pytest.mark.parametrize("end", [utils.terminate_mp_processes, nvrx_changes.end_process_groups])
def test_leftovers_of_workers_are_ended(end: Any) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"], start_new_session=True)
    threading.Thread(target=process.wait).start()
    end({process.pid})
    assert process.wait(30) < 0


def test_ending_groups_that_are_gone_takes_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """NVRx sleeps 1 s here, in every restart."""
    process = subprocess.Popen([sys.executable, "-c", ""], start_new_session=True)
    process.wait()
    slept: list[float] = []
    monkeypatch.setattr(time, "sleep", slept.append)
    nvrx_changes.end_process_groups({process.pid})
    assert slept == []
    utils.terminate_mp_processes({process.pid})
    assert slept == [1.0]


def twice_without_a_section(kind: type[Any]) -> Any:
    """Return a monitor's state after a first life and two ranks that died before their first section."""
    state = kind(SimpleNamespace(log_restarter_event=lambda *_: None))
    state.handle_section_msg()
    for _ in range(2):
        state.handle_ipc_connection_lost()
    return state


def test_monitor_drops_its_rank_in_nvrx() -> None:
    with pytest.raises(AssertionError):
        twice_without_a_section(rank_monitor_server.RankMonitorStateMachine).handle_section_msg()


def test_monitor_keeps_watching() -> None:
    twice_without_a_section(nvrx_changes.RankMonitorState).handle_section_msg()


def worker_agent(process: subprocess.Popen[bytes]) -> Any:
    agent = nvrx_changes.Agent.__new__(nvrx_changes.Agent)
    worker = SimpleNamespace(local_rank=0, global_rank=5)
    agent._worker_group = SimpleNamespace(workers=[worker])
    agent._pcontext = SimpleNamespace(subprocess_handlers={0: SimpleNamespace(proc=process)})
    agent._reported = set()
    return agent


def test_worker_exit_is_told_once_with_its_signal(agent: Path) -> None:
    process = subprocess.Popen([sys.executable, "-c", "import time; time.sleep(600)"])
    reporter = worker_agent(process)
    reporter._report_exits(stopped=False)
    os.kill(process.pid, 9)
    process.wait()
    reporter._report_exits(stopped=False)
    reporter._report_exits(stopped=True)
    told = [event for event in read_events(agent) if event["event"] == "worker_exit"]
    assert [(e["rank"], e["worker_pid"], e["signal"], e["stopped"]) for e in told] == [
        (5, process.pid, 9, False)
    ]


def test_survivors_of_a_fault_are_killed_not_asked(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(launcher.LocalElasticAgent, "_shutdown", lambda self, *args: asked.append(args))
    agent = nvrx_changes.Agent.__new__(nvrx_changes.Agent)
    agent._shutdown(timeout=5)
    agent._shutdown(signal.SIGTERM, timeout=5)
    assert asked == [(9, 5), (15, 5)]
