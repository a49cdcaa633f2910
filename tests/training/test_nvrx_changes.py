"""Each change beside what NVRx does without it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from nvidia_resiliency_ext.fault_tolerance import ft_rendezvous_barrier as barrier
from nvidia_resiliency_ext.fault_tolerance import launcher, rank_monitor_server, utils
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from training import nvrx_changes
from training.environment import free_port
from training.events import EventLog, read_events

NODE = barrier._NodeDesc("127.0.0.1", 1, 0)
OTHER = barrier._NodeDesc("127.0.0.1", 2, 0)


def make_store() -> TCPStore:
    return TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)


@pytest.fixture
def agent(tmp_path: Path) -> Iterator[Path]:
    """Give the changed agent an event log and a round file, as `apply_to_launcher` does."""
    with EventLog(tmp_path, role="launcher", node="node-0") as events:
        nvrx_changes.Agent.events = events
        nvrx_changes.Agent.round_file = tmp_path / "round"
        yield tmp_path


def make_handler(store: TCPStore, kind: Any) -> Any:
    handler = kind.__new__(kind)
    handler._store, handler._this_node, handler._assigned_rank = store, NODE, 0
    handler._settings = SimpleNamespace(run_id="run")
    handler._cycle_info_reporter, handler._agent = None, None
    handler._barrier_state = barrier._RendezvousBarrierState(store, "run")
    return handler


def agent_in(state: WorkerState) -> Any:
    return SimpleNamespace(
        _worker_group=SimpleNamespace(state=state),
        _progress_tracker=SimpleNamespace(sync_cycle_number=lambda number: None),
    )


class LostStore:
    """1: a control store that is lost while ranks train."""

    def __init__(self) -> None:
        self.server = subprocess.Popen(
            [sys.executable, "-c", STORE_SERVER], stdout=subprocess.PIPE, text=True
        )
        assert self.server.stdout is not None
        self.port = int(self.server.stdout.readline())
        self.client = TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def lose(self) -> None:
        self.server.kill()
        self.server.wait()
        assert self.server.stdout is not None
        self.server.stdout.close()


STORE_SERVER = """
import time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


def test_lost_control_store_stops_healthy_workers_in_nvrx() -> None:
    lost = LostStore()
    handler = make_handler(lost.client, barrier.FtRendezvousBarrierHandler)
    lost.lose()
    with pytest.raises(RuntimeError):
        handler.is_next_round_open()


def test_training_goes_on_without_the_control_store(agent: Path) -> None:
    lost = LostStore()
    handler = make_handler(lost.client, nvrx_changes.RendezvousHandler)
    lost.lose()
    assert [handler.is_next_round_open() for _ in range(3)] == [False, False, False]
    assert [event["event"] for event in read_events(agent)] == ["control_lost"]


class Link:
    """A network path to a port that can be cut: what goes over it is reset, what comes later is refused."""

    def __init__(self, port: int) -> None:
        self._target, self._sockets = port, list[socket.socket]()
        self.port = free_port()
        self.mend()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        for end in (self._listener, *self._sockets):
            with contextlib.suppress(OSError):
                end.shutdown(socket.SHUT_RDWR)
            end.close()
        self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                far = socket.create_connection(("127.0.0.1", self._target))
                self._sockets += [near, far]
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def test_launcher_goes_on_with_a_control_store_that_only_was_cut_off(agent: Path) -> None:
    """GIVEN a connection that broke THEN a store that never died restarts nothing, and is heard again."""
    store = make_store()
    store.set(nvrx_changes.STORE_ID_KEY, "store-1")
    link = Link(store.port)
    client = TCPStore("127.0.0.1", link.port, is_master=False, wait_for_workers=False)
    handler = make_handler(client, nvrx_changes.RendezvousHandler)
    assert not handler.is_next_round_open()
    link.cut()
    assert [handler.is_next_round_open() for _ in range(2)] == [False, False]
    link.mend()
    store.set("ft_rendezvous_barrier:run:round_done_1", "0")
    assert wait_for(handler.is_next_round_open, seconds=30)
    assert [event["event"] for event in read_events(agent)] == ["control_lost", "control_answers"]


@pytest.mark.usefixtures("agent")
def test_launcher_gives_way_to_a_new_control_store() -> None:
    lost = LostStore()
    lost.client.set(nvrx_changes.STORE_ID_KEY, "store-1")
    handler = make_handler(lost.client, nvrx_changes.RendezvousHandler)
    assert not handler.is_next_round_open()
    lost.lose()
    assert not handler.is_next_round_open()
    back = TCPStore("127.0.0.1", lost.port, is_master=True, wait_for_workers=False)
    back.set(nvrx_changes.STORE_ID_KEY, "store-2")
    with pytest.raises(nvrx_changes.ControlReturned):
        handler.is_next_round_open()
    del back


def test_failed_launcher_closes_the_rendezvous_in_nvrx() -> None:
    store = make_store()
    handler = make_handler(store, barrier.FtRendezvousBarrierHandler)
    handler._agent = agent_in(WorkerState.FAILED)
    handler.shutdown()
    assert handler.is_closed()


@pytest.mark.parametrize(("state", "closed"), [(WorkerState.FAILED, False), (WorkerState.SUCCEEDED, True)])
def test_only_success_closes_the_rendezvous(state: WorkerState, *, closed: bool) -> None:
    handler = make_handler(make_store(), nvrx_changes.RendezvousHandler)
    handler._agent = agent_in(state)
    handler.shutdown()
    assert handler.is_closed() == closed


def close_round(store: TCPStore, number: int) -> None:
    store.set(f"ft_rendezvous_barrier:run:round_done_{number}", "1")


def test_replacement_of_a_launcher_at_work_opens_the_next_round(agent: Path) -> None:
    store = make_store()
    store.set(nvrx_changes.STORE_ID_KEY, "store-1")
    before = make_handler(store, nvrx_changes.RendezvousHandler)
    before.note_round(agent / "round")
    close_round(store, 0)
    after = make_handler(store, nvrx_changes.RendezvousHandler)
    after.set_agent(agent_in(WorkerState.INIT))
    assert after.round() == 1
    assert store.get("ft_rendezvous_barrier:run:round_done_1") == b"0"


@pytest.mark.parametrize("noted", ["store-1:0", "store-2:1", None])
def test_replacement_of_a_launcher_that_was_not_at_work_waits(agent: Path, noted: str | None) -> None:
    store = make_store()
    store.set(nvrx_changes.STORE_ID_KEY, "store-1")
    if noted:
        (agent / "round").write_text(noted)
    close_round(store, 0)
    close_round(store, 1)
    handler = make_handler(store, nvrx_changes.RendezvousHandler)
    handler.set_agent(agent_in(WorkerState.INIT))
    assert handler.round() == 2
    assert not store.check(["ft_rendezvous_barrier:run:round_done_2"])


def host(store: TCPStore, kind: type[Any], stop: threading.Event) -> tuple[threading.Thread, Any]:
    """Run the control's wait for the next round, round 0 being at work on one node."""
    state = kind(store, "run", is_store_host=True)
    state._nodes = 1
    close_round(store, 0)

    def wait() -> None:
        with pytest.raises((RendezvousGracefulExitError, RuntimeError)):
            state.close_current_round_as_host(NODE, 1, 2, stop_event=stop)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, state


def wait_for(condition: Any, *, seconds: float) -> bool:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False


@pytest.mark.parametrize(
    ("kind", "opened"), [(barrier._RendezvousBarrierState, False), (nvrx_changes.ControlState, True)]
)
def test_round_of_a_silent_node_is_opened(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any], *, opened: bool
) -> None:
    monkeypatch.setattr(nvrx_changes, "NODE_LOST_SECONDS", 0.2)
    store, stop = make_store(), threading.Event()
    thread, _ = host(store, kind, stop)
    key = "ft_rendezvous_barrier:run:round_done_1"
    assert wait_for(lambda: store.check([key]), seconds=10 if opened else 2) == opened
    stop.set()
    thread.join(30)


def test_node_with_heartbeats_or_at_its_end_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrx_changes, "NODE_LOST_SECONDS", 1.0)
    monkeypatch.setattr(nvrx_changes, "HEARTBEAT_SECONDS", 0.0)
    store, stop = make_store(), threading.Event()
    node = make_handler(store, nvrx_changes.RendezvousHandler)
    thread, _ = host(store, nvrx_changes.ControlState, stop)
    end = time.monotonic() + 2.0
    while time.monotonic() < end:
        assert not node.is_next_round_open()
        time.sleep(0.05)
    node.finish()
    time.sleep(2.0)
    assert not node.is_next_round_open()
    stop.set()
    thread.join(30)


def test_control_knows_the_end_and_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrx_changes.ControlState, "ended", threading.Event())
    monkeypatch.setattr(nvrx_changes.ControlState, "linger_seconds", 600.0)
    store, stop = make_store(), threading.Event()
    thread, state = host(store, nvrx_changes.ControlState, stop)
    state.set_shutdown()
    assert state.ended.wait(30)
    assert thread.is_alive()
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


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
