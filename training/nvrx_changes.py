"""Where Holdfast changes what NVRx does, and why: nothing else in the tree touches NVRx's internals.

The changes are subclasses put in the place of NVRx's classes, in our launcher (`training/agent.py`)
and control process only. Another version is refused (training/nvrx_version.py); before one is added, read
its launcher.py, ft_rendezvous_barrier.py and control_plane.py against the list below first. 0.7.0 was
read, and not tried.

    #   0.6.0 does                                            0.7.0   here
    1   stops healthy workers when the control store is lost  same    train on, re-form when it is back
    2   closes the rendezvous for ever on any launcher error  fixed   only after success
    3   SIGTERMs survivors, which sit in a collective         same    SIGKILL: their state is not wanted
    4   sleeps 1 s in each stop, 1 s in each poll             same    0.1 s, and as long as needed
    5   exits 0 on an unhealthy node (completes a Job index)  fixed   exits 1
    6   a round nobody is left in is never opened again       same    heartbeats; the control opens it
    7   a replaced launcher waits for others to see the loss  same    it opens the next round itself
    8   waits 300 s at the end for launchers that are gone    same    30 s
    9   control exits at the end before late spares see it    3 s     lingers, as long as asked
    10  tells nobody how a worker ended                       same    `worker_exit` events
    11  can't watch a rank that died twice before a section   same    keeps no state of restarts
    12  starts each rank from nothing, imports included       same    forks it from a warm server
    13  logs every poll and check at INFO                     same    WARNING
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import threading
import time
import types
import uuid
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, ClassVar

import nvidia_resiliency_ext.fault_tolerance.ft_rendezvous_barrier as barrier
from nvidia_resiliency_ext.fault_tolerance import (
    c10d_monkey_patch,
    control_plane,
    launcher,
    rank_monitor_server,
)
from torch._C._distributed_c10d import Store, TCPStore
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler
from torch.distributed.elastic.rendezvous import api as rendezvous

from training import shared_memory
from training.events import EventLog
from training.fork_server import ForkServer, ForkServerLost
from training.nvrx_version import check_version
from training.processes import reap_orphans

POLL_SECONDS = 0.1
HEARTBEAT_SECONDS = 1.0
NODE_LOST_SECONDS = 10.0
CONTROL_PROBE_SECONDS = 1.0
CONTROL_ANSWER_SECONDS = 5.0
EXIT_BARRIER_SECONDS = 30
LEFTOVERS_SECONDS = 1.0
FINISHED = "/finished"
STORE_ID_KEY = "holdfast/store_id"


def apply_to_launcher(events: EventLog, round_file: Path, *, workers: ForkServer | None) -> None:
    """Put the changed agent, rendezvous and stop into this process.

    Args:
        events: Log that takes rounds and worker exits.
        round_file: Where this node notes the round that it works in; outlives the launcher.
        workers: Server that ranks are forked from; None to start them as new programs.
    """
    check_version()
    Agent.events, Agent.round_file = events, round_file
    launcher.LocalElasticAgent = Agent
    launcher.terminate_mp_processes = end_process_groups
    _quieten(launcher)
    launcher.is_slurm_job_array = lambda: True  # 5: the branch that exits non-zero
    barrier.FtRendezvousBarrierHandler = RendezvousHandler
    rank_monitor_server.RankMonitorStateMachine = RankMonitorState
    WorkerHandler.server = workers
    setattr(multiprocessing_api, "get_subprocess_handler", WorkerHandler)  # noqa: B010
    _quicken_polls()


def apply_to_control(linger_seconds: float) -> Callable[[], bool]:
    """Put the changed control plane into this process.

    Args:
        linger_seconds: Time that late spares get to see the end of the run.

    Returns:
        A function that says whether the run has ended.
    """
    check_version()
    ControlState.linger_seconds = linger_seconds
    control_plane._RendezvousBarrierState = ControlState
    _quieten(control_plane)
    _quicken_polls()
    return ControlState.ended.is_set


class Agent(launcher.LocalElasticAgent):  # type: ignore[misc]
    """3, 8, 10: stops workers at once, and reports how they ended."""

    events: ClassVar[EventLog]
    round_file: ClassVar[Path]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "exit_barrier_timeout": EXIT_BARRIER_SECONDS})
        self._reported: set[int] = set()

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        self._rdzv_handler.note_round(self.round_file)
        ranks = {worker.local_rank: worker.global_rank for worker in worker_group.workers}
        workers = {ranks[local_rank]: pid for local_rank, pid in pids.items()}
        self.events.emit("round", round=self._rdzv_handler.round(), workers=workers)
        shared_memory.sweep()  # here, and not before, it holds up no restart
        return pids  # type: ignore[no-any-return]

    def _monitor_workers(self, worker_group: Any) -> Any:
        result = super()._monitor_workers(worker_group)
        if result.state is not WorkerState.HEALTHY:
            self._report_exits(stopped=False)
        monitors = [monitor.process.pid for monitor in self._rank_monitors.values()]
        reap_orphans(keep=[*self._pcontext.pids().values(), *monitors])
        return result

    def _stop_workers(self, worker_group: Any, *args: Any, **kwargs: Any) -> None:
        self._report_exits(stopped=False)
        super()._stop_workers(worker_group, *args, **kwargs)
        self._report_exits(stopped=True)

    def _shutdown(self, death_sig: signal.Signals | None = None, timeout: int = 30) -> None:
        # Only a launcher that was itself told to stop names a signal; then workers may save.
        super()._shutdown(death_sig or signal.SIGKILL, timeout)

    def _exit_barrier(self) -> None:
        self._rdzv_handler.finish()
        super()._exit_barrier()

    def _report_exits(self, *, stopped: bool) -> None:
        """Emit an event for each worker that has ended; `stopped` says that we ended it."""
        if self._pcontext is None:
            return
        for worker in self._worker_group.workers:
            process = self._pcontext.subprocess_handlers[worker.local_rank].proc
            code = process.poll()
            if code is None or process.pid in self._reported:
                continue
            self._reported.add(process.pid)
            self.events.emit(
                "worker_exit",
                rank=worker.global_rank,
                worker_pid=process.pid,
                exit_code=code if code >= 0 else None,
                signal=-code if code < 0 else None,
                stopped=stopped,
            )


class RendezvousHandler(barrier.FtRendezvousBarrierHandler):  # type: ignore[misc]
    """1, 2, 6, 7: survives a lost control store, and never closes a rendezvous that others need."""

    _store: Any
    _lost_since: float | None = None
    _store_id = ""
    _next_probe = 0.0
    _next_heartbeat = 0.0

    def is_next_round_open(self) -> bool:
        """Say whether a peer has called for a restart; a store that is gone has no peers' calls.

        Raises:
            ControlReturned: A new store is in the lost one's place. Reconnecting to it is no way: it
                begins at round 0 while this launcher is at N, so all launchers start afresh.
        """
        if self._lost_since is not None and not self._is_control_back():
            return False
        try:
            self._store_id = self._store_id or _read_store_id(self._store)
            self._beat()
            return bool(super().is_next_round_open())
        except RuntimeError as error:
            self._lost_since = time.time()
            reason = str(error).splitlines()[0]
            Agent.events.emit("control_lost", message=reason)
            barrier.log.warning("control store lost, training goes on without it: %s", reason)
            return False

    def shutdown(self, *args: Any, **kwargs: Any) -> bool:
        agent = self._agent
        if agent is not None and agent._worker_group.state is WorkerState.SUCCEEDED:
            return bool(super().shutdown(*args, **kwargs))
        return True

    def note_round(self, path: Path) -> None:
        """Write down the round that this node works in, for a launcher that has to take over."""
        path.write_text(self._round_name(self.round()))

    def finish(self) -> None:
        """Tell the control that this node's workers are done, so that its silence is no loss."""
        with contextlib.suppress(RuntimeError):  # the end needs no control store
            self._store.set(heartbeat_key(self._barrier_state, self._assigned_rank) + FINISHED, "")

    def _complete_initialization(self) -> None:
        super()._complete_initialization()
        state, path = self._barrier_state, Agent.round_file
        last_round = state._round - 1
        if path.exists() and path.read_text() == self._round_name(last_round):
            barrier.log.warning("an earlier launcher of this node ended in round %d", last_round)
            state.store.compare_set(state.round_done_key, "", "0")

    def _round_name(self, number: int) -> str:
        return f"{_read_store_id(self._store)}:{number}"

    def _beat(self) -> None:
        now = time.monotonic()
        if now >= self._next_heartbeat:
            self._next_heartbeat = now + HEARTBEAT_SECONDS
            self._store.add(heartbeat_key(self._barrier_state, self._assigned_rank), 1)

    def _is_control_back(self) -> bool:
        """Look for the store once a probe interval; go on with it if it is the one that was lost.

        Raises:
            ControlReturned: It is another one.
        """
        store = self._probe_control()
        if store is None:
            return False
        if not self._store_id or _read_store_id(store) != self._store_id:
            raise ControlReturned
        store.set_timeout(self._store.timeout)
        # The old connection may hold a late answer, which the next question would take for its own
        self._store = self._barrier_state.store = store
        if self._agent is not None:
            self._agent._store = self._get_store()
        Agent.events.emit("control_answers", seconds=time.time() - (self._lost_since or 0.0))
        barrier.log.warning("the control store answers again and has lost nothing: going on with it")
        self._lost_since = None
        return True

    def _probe_control(self) -> TCPStore | None:
        """Return a new client of the store, or None while nothing answers."""
        now = time.monotonic()
        if now < self._next_probe:
            return None
        self._next_probe = now + CONTROL_PROBE_SECONDS
        host, port = self._store.host, self._store.port
        timeout = timedelta(seconds=CONTROL_ANSWER_SECONDS)
        try:
            socket.create_connection((host, port), timeout=CONTROL_PROBE_SECONDS).close()
            store = TCPStore(host, port, is_master=False, wait_for_workers=False, timeout=timeout)
            store.check([STORE_ID_KEY])
        except (OSError, RuntimeError):
            return None
        return store


def _read_store_id(store: Store) -> str:
    """Return the name that a control store gives itself, empty if it has none (yet)."""
    return store.get(STORE_ID_KEY).decode() if store.check([STORE_ID_KEY]) else ""


class ControlReturned(Exception):
    """A new control store is in the place of a lost one: a fresh launcher must replace this one."""

    raised = False

    def __init__(self) -> None:
        super().__init__("the control store is a new one: forming a new round")
        ControlReturned.raised = True


class WorkerHandler(SubprocessHandler):
    """12: starts `python -m training ...` as a copy of a process that has imported it all."""

    server: ClassVar[ForkServer | None] = None

    def _popen(self, args: tuple[str, ...], env: dict[str, str]) -> Any:
        prefix = (sys.executable, "-m", "training")
        if self.server is not None and args[:3] == prefix:
            try:
                return self.server.spawn(args[3:], env)
            except ForkServerLost as error:
                type(self).server = None
                barrier.log.warning("fork server lost (%s): ranks take seconds to import", error)
        return super()._popen(args, env)


class RankMonitorState(rank_monitor_server.RankMonitorStateMachine):  # type: ignore[misc]
    """11: the state is only for NVRx's log, but a "wrong" transition makes the monitor drop its rank."""

    def handle_heartbeat_msg(self) -> None: ...

    def handle_section_msg(self) -> None: ...

    def handle_ipc_connection_lost(self) -> None: ...

    def handle_signal(self) -> None: ...


class ControlState(barrier._RendezvousBarrierState):  # type: ignore[misc]
    """6, 9: opens a new round when a node falls silent, and knows when the run has ended."""

    ended: ClassVar[threading.Event] = threading.Event()
    linger_seconds: ClassVar[float] = 0.0

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store.set(STORE_ID_KEY, uuid.uuid4().hex)
        self._last_beats: dict[int, tuple[bytes, float]] = {}
        self._nodes = 0

    def close_current_round_as_host(
        self, node: Any, min_nodes: int, *args: Any, stop_event: threading.Event, **kwargs: Any
    ) -> int:
        self._nodes = min_nodes
        try:
            closed = super().close_current_round_as_host(
                node, min_nodes, *args, stop_event=stop_event, **kwargs
            )
        except (rendezvous.RendezvousClosedError, rendezvous.RendezvousGracefulExitError):
            if self.is_shutdown():
                self.ended.set()
                stop_event.wait(self.linger_seconds)
            raise
        self._last_beats = {}
        return int(closed)

    def is_shutdown(self) -> bool:
        # NVRx asks this once in every poll while it waits for a round: the one place to look around.
        self._open_round_for_silent_nodes()
        return bool(super().is_shutdown())

    def _open_round_for_silent_nodes(self) -> None:
        if self._nodes == 0 or self._round == 0 or self.store.check([self.round_done_key]):
            return
        silent = [rank for rank in range(self._nodes) if self._is_silent(rank)]
        if silent:
            barrier.log.warning("no heartbeat of nodes %s in round %d", silent, self._round - 1)
            self.store.set(self.round_done_key, "0")

    def _is_silent(self, group_rank: int) -> bool:
        key, now = heartbeat_key(self, group_rank, round_number=self._round - 1), time.monotonic()
        if self.store.check([key + FINISHED]):
            return False
        beat = self.store.get(key) if self.store.check([key]) else b""
        last_beat, since = self._last_beats.setdefault(group_rank, (beat, now))
        if beat != last_beat:
            self._last_beats[group_rank] = (beat, now)
            return False
        return now - since > NODE_LOST_SECONDS


def heartbeat_key(state: Any, group_rank: int, *, round_number: int | None = None) -> str:
    """Return the key that counts a node's heartbeats in a round."""
    number = state._round if round_number is None else round_number
    return f"holdfast/heartbeat/{state.run_id}/{number}/{group_rank}"


def end_process_groups(allowed_pgids: set[int]) -> None:
    """4: stop what workers left behind in their process groups, and wait only while it lives."""
    _signal_groups(allowed_pgids, signal.SIGTERM)
    deadline = time.monotonic() + LEFTOVERS_SECONDS
    while time.monotonic() < deadline and _signal_groups(allowed_pgids, 0):
        time.sleep(0.01)
    _signal_groups(allowed_pgids, signal.SIGKILL)


def _signal_groups(groups: set[int], number: int) -> bool:
    """Send a signal to process groups; say whether any of them exists."""
    found = False
    for group in groups:
        try:
            os.killpg(group, number)
            found = True
        except ProcessLookupError:
            continue
    return found


def _quicken_polls() -> None:
    """4: NVRx's polls go through the `time` of their own module, which is replaced there only."""
    barrier.time = types.SimpleNamespace(
        sleep=lambda seconds: time.sleep(min(seconds, POLL_SECONDS)),
        monotonic=time.monotonic,
        time=time.time,
    )
    wait_for_server = c10d_monkey_patch._wait_for_tcp_store_server

    def wait(host: str, port: int, max_wait_seconds: float) -> None:
        wait_for_server(host, port, max_wait_seconds, probe_interval_seconds=POLL_SECONDS)

    c10d_monkey_patch._wait_for_tcp_store_server = wait
    barrier._RendezvousBarrierState._compute_step2_poll_interval = staticmethod(
        lambda min_nodes, segment_check_interval: POLL_SECONDS
    )


def _quieten(module: types.ModuleType) -> None:
    """13: NVRx sets its level when it makes its logger; set ours right after."""
    setup_logger = module.setup_logger

    def setup(*args: Any, **kwargs: Any) -> logging.Logger:
        logger: logging.Logger = setup_logger(*args, **kwargs)
        logger.setLevel(logging.WARNING)
        return logger

    module.setup_logger = setup  # type: ignore[attr-defined]
