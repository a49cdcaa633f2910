"""Each change to the rendezvous beside what NVRx does without it."""

from __future__ import annotations

import contextlib
import json
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
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous.api import RendezvousGracefulExitError

from tests.training.stores import StoreProcess, make_store, until
from training import control_watch, nvrx_rendezvous
from training.control_watch import STORE_ID_KEY
from training.environment import free_port
from training.events import EventLog, read_events
from training.nvrx_rendezvous import ControlReturned, ControlState, RendezvousHandler

NODES = [barrier._NodeDesc("127.0.0.1", pid, 0) for pid in range(4)]
WATCHES: list[control_watch.ControlWatch] = []
ROUND_1 = "ft_rendezvous_barrier:run:round_done_1"


@pytest.fixture
def node(tmp_path: Path) -> Iterator[Path]:
    """Give the changed handler an event log and a round file, as `apply_to_launcher` does."""
    with EventLog(tmp_path, role="launcher", node="node-0") as events:
        RendezvousHandler.events, RendezvousHandler.round_file = events, tmp_path / "round"
        yield tmp_path
        for watch in WATCHES:
            watch.close()
        WATCHES.clear()


def make_handler(store: TCPStore, kind: Any = RendezvousHandler) -> Any:
    handler = kind.__new__(kind)
    handler._store, handler._this_node, handler._assigned_rank = store, NODES[0], 0
    handler._settings = SimpleNamespace(run_id="run")
    handler._cycle_info_reporter = handler._agent = handler._attribution_service = None
    handler._barrier_state = barrier._RendezvousBarrierState(store, "run")
    return handler


def at_work(store: TCPStore, kind: Any = RendezvousHandler) -> Any:
    handler = make_handler(store, kind)
    handler.set_agent(agent_in(WorkerState.HEALTHY))
    WATCHES.append(handler._watch)
    return handler


def agent_in(state: WorkerState) -> Any:
    return SimpleNamespace(
        _worker_group=SimpleNamespace(state=state),
        _progress_tracker=SimpleNamespace(sync_cycle_number=lambda number: None),
    )


def event_names(run_dir: Path) -> list[str]:
    return [event["event"] for event in read_events(run_dir)]


@pytest.fixture
def lost() -> Iterator[StoreProcess]:
    """1: a control store that is lost while ranks train."""
    with StoreProcess() as store:
        store.client().set(STORE_ID_KEY, "store-1")
        yield store


def test_lost_control_store_stops_healthy_workers_in_nvrx(lost: StoreProcess) -> None:
    handler = make_handler(lost.client(), barrier.FtRendezvousBarrierHandler)
    lost.kill()
    with pytest.raises(RuntimeError):
        handler.is_next_round_open()


def test_training_goes_on_without_the_control_store(node: Path, lost: StoreProcess) -> None:
    handler = at_work(lost.client())
    lost.kill()
    assert until(lambda: handler.is_next_round_open() or event_names(node) == ["control_lost"])
    assert [handler.is_next_round_open() for _ in range(3)] == [False, False, False]
    assert event_names(node) == ["control_lost"]


def test_launcher_never_waits_for_a_store_that_is_stopped(
    node: Path, lost: StoreProcess, monkeypatch: pytest.MonkeyPatch
) -> None:
    """GIVEN a control store that is stopped THEN the launcher sees it, and hears it when it goes on."""
    monkeypatch.setattr(control_watch, "ANSWER_SECONDS", 0.5)
    handler = at_work(lost.client())
    assert not handler.is_next_round_open()
    lost.send_signal(signal.SIGSTOP)
    assert until(lambda: handler.is_next_round_open() or event_names(node) == ["control_lost"])
    lost.send_signal(signal.SIGCONT)
    lost.client().set(ROUND_1, "0")
    assert until(handler.is_next_round_open)
    assert event_names(node) == ["control_lost", "control_answers"]


def test_store_that_names_itself_late_is_no_other_store(node: Path, lost: StoreProcess) -> None:
    """GIVEN a launcher that met the control store before it had a name THEN it takes the first one."""
    store = lost.client()
    store.delete_key(STORE_ID_KEY)
    handler = at_work(store)
    store.set(STORE_ID_KEY, "store-1")
    store.set(ROUND_1, "0")
    assert until(handler.is_next_round_open)
    assert handler._watch.store_id == "store-1"


def test_store_that_stops_in_a_rendezvous_ends_the_launcher(lost: StoreProcess) -> None:
    """GIVEN a call to a stopped store, which no Python could end THEN the kernel ends the process."""
    script = f"""
from torch._C._distributed_c10d import TCPStore
from training import nvrx_rendezvous
nvrx_rendezvous.STORE_CALL_SECONDS = 3.0
store = TCPStore("127.0.0.1", {lost.port}, is_master=False, wait_for_workers=False)
with nvrx_rendezvous._bounded_store_calls():
    for _ in range(5):
        nvrx_rendezvous._sleep(1.0)
    print("waits", flush=True)
    while True:
        store.check(["key"])
"""
    client = subprocess.Popen([sys.executable, "-c", script], stdout=subprocess.PIPE, text=True)
    assert client.stdout is not None
    assert client.stdout.readline() == "waits\n"
    lost.send_signal(signal.SIGSTOP)
    assert client.wait(60) == -signal.SIGALRM
    client.stdout.close()


class Link:
    """A network path to a port that can be cut: what goes over it is reset, what comes later is refused."""

    def __init__(self, port: int) -> None:
        self._target, self._sockets = port, list[socket.socket]()
        self._lock = threading.Lock()
        self.port = free_port()
        self.mend()

    def mend(self) -> None:
        self._listener = socket.create_server(("127.0.0.1", self.port))
        threading.Thread(target=self._accept, args=(self._listener,), daemon=True).start()

    def cut(self) -> None:
        with self._lock:
            for end in (self._listener, *self._sockets):
                with contextlib.suppress(OSError):
                    end.shutdown(socket.SHUT_RDWR)
                end.close()
            self._sockets.clear()

    def _accept(self, listener: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while True:
                near, _ = listener.accept()
                with self._lock:
                    if listener.fileno() < 0:  # cut just now
                        near.close()
                        return
                    self._sockets.append(near)
                    far = socket.create_connection(("127.0.0.1", self._target))
                    self._sockets.append(far)
                for ends in ((near, far), (far, near)):
                    threading.Thread(target=self._pump, args=ends, daemon=True).start()

    def _pump(self, source: socket.socket, target: socket.socket) -> None:
        with contextlib.suppress(OSError):
            while data := source.recv(65536):
                target.sendall(data)
            target.shutdown(socket.SHUT_RDWR)


def test_launcher_goes_on_with_a_control_store_that_only_was_cut_off(node: Path) -> None:
    """GIVEN a connection that broke THEN a store that never died restarts nothing, and is heard again."""
    store = make_store()
    link = Link(store.port)
    handler = at_work(TCPStore("127.0.0.1", link.port, is_master=False, wait_for_workers=False))
    assert not handler.is_next_round_open()
    link.cut()
    assert until(lambda: handler.is_next_round_open() or event_names(node) == ["control_lost"])
    link.mend()
    store.set(ROUND_1, "0")
    assert until(handler.is_next_round_open)
    assert event_names(node) == ["control_lost", "control_answers"]
    assert handler._store.check([ROUND_1])
    handler._watch.close()
    link.cut()


@pytest.mark.usefixtures("node")
def test_launcher_gives_way_to_a_new_control_store(lost: StoreProcess) -> None:
    handler = at_work(lost.client())
    lost.kill()
    with StoreProcess(port=lost.port) as back:
        back.client().set(STORE_ID_KEY, "store-2")
        with pytest.raises(ControlReturned):
            until(handler.is_next_round_open)


def test_failed_launcher_closes_the_rendezvous_in_nvrx() -> None:
    handler = make_handler(make_store(), barrier.FtRendezvousBarrierHandler)
    handler._agent = agent_in(WorkerState.FAILED)
    handler.shutdown()
    assert handler.is_closed()


@pytest.mark.parametrize(("state", "closed"), [(WorkerState.FAILED, False), (WorkerState.SUCCEEDED, True)])
def test_only_success_closes_the_rendezvous(state: WorkerState, *, closed: bool) -> None:
    handler = make_handler(make_store())
    handler._agent = agent_in(state)
    handler.shutdown()
    assert handler.is_closed() == closed


def close_round(store: TCPStore, number: int) -> None:
    store.set(f"ft_rendezvous_barrier:run:round_done_{number}", "1")


@pytest.mark.usefixtures("node")
def test_replacement_of_a_launcher_at_work_opens_the_next_round() -> None:
    store = make_store()
    at_work(store).note_round(rank=3)
    close_round(store, 0)
    after = at_work(store)
    assert after.round() == 1
    assert json.loads(store.get(nvrx_rendezvous.claim_key("run", 0)))["rank"] == 3
    assert store.get(ROUND_1) == b"0"


@pytest.mark.parametrize("noted", ["store-1:0", "store-2:1", None])
def test_replacement_of_a_launcher_that_was_not_at_work_waits(node: Path, noted: str | None) -> None:
    store = make_store()
    if noted:
        (node / "round").write_text(noted)
    close_round(store, 0)
    close_round(store, 1)
    handler = at_work(store)
    assert handler.round() == 2
    assert not store.check(["ft_rendezvous_barrier:run:round_done_2"])


def host(store: TCPStore, kind: type[Any], stop: threading.Event) -> tuple[threading.Thread, Any]:
    """Run the control's wait for the next round, round 0 being at work on nodes 0 and 1."""
    state = kind(store, "run", is_store_host=True)
    state._ranks = {0: 0, 1: 1}
    close_round(store, 0)

    def wait() -> None:
        with pytest.raises((RendezvousGracefulExitError, RuntimeError)):
            state.close_current_round_as_host(NODES[0], 1, 2, stop_event=stop)

    thread = threading.Thread(target=wait)
    thread.start()
    return thread, state


def beat_until(stop: threading.Event, store: TCPStore, node: int) -> None:
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    while not stop.wait(0.05):
        client.add(nvrx_rendezvous.heartbeat_key("run", node), 1)


@pytest.mark.parametrize(("kind", "opened"), [(barrier._RendezvousBarrierState, False), (ControlState, True)])
def test_round_of_a_silent_node_is_opened(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any], *, opened: bool
) -> None:
    """GIVEN node 0 with heartbeats and node 1 without THEN only NVRx waits for ever."""
    monkeypatch.setattr(nvrx_rendezvous, "NODE_LOST_SECONDS", 1.0)
    store, stop = make_store(), threading.Event()
    beating = threading.Thread(target=beat_until, args=(stop, store, 0))
    beating.start()
    thread, _ = host(store, kind, stop)
    assert until(lambda: store.check([ROUND_1]), seconds=30 if opened else 3) == opened
    stop.set()
    thread.join(30)
    beating.join(30)


def test_nodes_that_are_all_silent_get_more_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a control that hears nobody THEN it takes its own network for the cause, for a while."""
    monkeypatch.setattr(nvrx_rendezvous, "NODE_LOST_SECONDS", 0.1)
    monkeypatch.setattr(nvrx_rendezvous, "ALL_LOST_SECONDS", 600.0)
    store, stop = make_store(), threading.Event()
    thread, state = host(store, ControlState, stop)
    assert until(lambda: state._hearing.silence_seconds(1) > 0.1)
    assert not store.check([ROUND_1])
    monkeypatch.setattr(nvrx_rendezvous, "ALL_LOST_SECONDS", 0.2)
    assert until(lambda: store.check([ROUND_1]))
    stop.set()
    thread.join(30)


@pytest.mark.usefixtures("node")
def test_node_with_heartbeats_or_at_its_end_is_not_silent(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrx_rendezvous, "NODE_LOST_SECONDS", 6.0)
    monkeypatch.setattr(nvrx_rendezvous, "ALL_LOST_SECONDS", 6.0)
    store, stop = make_store(), threading.Event()
    store.set(nvrx_rendezvous.finished_key("run", 0, 1), "")
    thread, state = host(store, ControlState, stop)
    working = at_work(TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False))
    working._barrier_state._round = 0
    assert not until(working.is_next_round_open, seconds=8)
    working.finish()
    working._watch.close()
    assert until(lambda: state._hearing.silence_seconds(0) > 7)
    assert not store.check([ROUND_1])
    stop.set()
    thread.join(30)


def test_control_that_was_stopped_itself_blames_nobody() -> None:
    store, keys = make_store(), {0: "beat"}
    hearing = nvrx_rendezvous.Hearing()
    hearing._looked -= 1.0
    hearing.look(store, keys)
    hearing._looked -= 100.0
    hearing._beats = {0: (b"", time.monotonic() - 100.0)}
    hearing.look(store, keys)
    assert hearing.silence_seconds(0) < 10


def participants(*nodes: int) -> list[tuple[Any, int, str]]:
    return [(NODES[node], node, "none") for node in nodes]


def claim(store: TCPStore, node: int, rank: int, *, number: int = 1) -> None:
    told = {"rank": rank, "round": f"lost:{number}", "time": float(number)}
    store.set(nvrx_rendezvous.claim_key("run", node), json.dumps(told))


def test_a_new_store_waits_for_survivors_of_the_lost_one(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN launchers that tell a new store their ranks THEN a spare that is quicker takes nobody's place."""
    monkeypatch.setattr(ControlState, "launchers", 3)
    store = make_store()
    state = ControlState(store, "run", is_store_host=True)
    claim(store, 1, rank=1)
    assert not state._can_meet_segment_constraint(participants(1, 2), 2)
    claim(store, 0, rank=0)
    assert state._can_meet_segment_constraint(participants(1, 2, 0), 2)
    assert state._assign_group_ranks(participants(1, 2, 0), 2) == {NODES[0]: 0, NODES[1]: 1, NODES[2]: 2}
    # AND one that does not come back is replaced
    monkeypatch.setattr(nvrx_rendezvous, "CLAIM_SECONDS", 0.2)
    state = ControlState(store, "run", is_store_host=True)
    assert until(lambda: state._can_meet_segment_constraint(participants(1, 2), 2))
    assert state._assign_group_ranks(participants(1, 2), 2) == {NODES[1]: 1, NODES[2]: 0}


def test_nobody_waits_at_the_start_of_a_run(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlState, "launchers", 2)
    state = ControlState(make_store(), "run", is_store_host=True)
    assert state._can_meet_segment_constraint(participants(1, 2), 2)


def test_a_new_store_waits_for_launchers_of_which_it_knows_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN a store and node 0 that were lost together THEN the pod and spare that come first wait."""
    monkeypatch.setattr(ControlState, "launchers", 3)
    store = make_store()
    state = ControlState(store, "run", is_store_host=True)
    assert not state._can_meet_segment_constraint(participants(0, 2), 2)
    claim(store, 1, rank=0)
    assert state._can_meet_segment_constraint(participants(0, 2, 1), 2)
    assert state._assign_group_ranks(participants(0, 2, 1), 2) == {NODES[1]: 0, NODES[0]: 1, NODES[2]: 2}
    # AND a run can start without its spare
    monkeypatch.setattr(nvrx_rendezvous, "CLAIM_SECONDS", 0.2)
    state = ControlState(make_store(), "run", is_store_host=True)
    assert until(lambda: state._can_meet_segment_constraint(participants(0, 1), 2))


def test_a_node_that_a_spare_has_replaced_claims_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """GIVEN node 0, whose rank went to node 2 in a later round THEN node 2 is waited for and keeps it."""
    monkeypatch.setattr(ControlState, "launchers", 4)
    store = make_store()
    state = ControlState(store, "run", is_store_host=True)
    claim(store, 0, rank=1, number=5)
    claim(store, 2, rank=1, number=6)
    claim(store, 3, rank=0, number=6)
    assert not state._can_meet_segment_constraint(participants(0, 3), 2)
    assert state._can_meet_segment_constraint(participants(0, 2, 3), 2)
    assert state._assign_group_ranks(participants(0, 2, 3), 2) == {NODES[2]: 1, NODES[3]: 0, NODES[0]: 2}


def test_control_knows_the_end_and_lingers(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ControlState, "ended", threading.Event())
    monkeypatch.setattr(ControlState, "linger_seconds", 600.0)
    store, stop = make_store(), threading.Event()
    thread, state = host(store, ControlState, stop)
    state.set_shutdown()
    assert state.ended.wait(30)
    assert thread.is_alive()
    stop.set()
    thread.join(30)
    assert not thread.is_alive()


def test_reason_of_a_restart_is_not_asked_of_a_store_that_was_lost(lost: StoreProcess) -> None:
    handler = make_handler(lost.client())
    lost.kill()
    assert handler.no_restart_reason() is None


if hasattr(barrier.FtRendezvousBarrierHandler, "no_restart_reason"):  # from 0.7.0 on

    def test_reason_of_a_restart_needs_the_store_in_nvrx(lost: StoreProcess) -> None:
        handler = make_handler(lost.client(), barrier.FtRendezvousBarrierHandler)
        lost.kill()
        with pytest.raises(RuntimeError):
            handler.no_restart_reason()
