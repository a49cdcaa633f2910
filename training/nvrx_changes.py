"""Where Holdfast changes what NVRx does, and why: nothing else in the tree touches NVRx's internals.

The changes are subclasses put in the place of NVRx's classes, in our launcher (`training/agent.py`)
and control process only. Another version is refused (training/nvrx_version.py); before one is added, read
its launcher.py, ft_rendezvous_barrier.py and control_plane.py against the lists below first, and run the
tests of training/ with it.

    #   0.6.0 does                                            0.7.0   here
    1   stops healthy workers when the control store is lost  same    train on, re-form when it is back
    2   closes the rendezvous for ever on any launcher error  partly  only after success
    3   SIGTERMs survivors, which sit in a collective         same    SIGKILL: their state is not wanted
    4   sleeps 1 s in each stop, 1 s in each poll             same    0.1 s, and as long as needed
    5   exits 0 on an unhealthy node (completes a Job index)  fixed   exits 1
    6   a round nobody is left in is never opened again       same    heartbeats; the control opens it
    7   a replaced launcher waits for others to see the loss  same    it opens the next round itself
    8   waits 300 s at the end for launchers that are gone    same    30 s
    9   control exits at the end before late spares see it    3 s     lingers, as long as asked, no more
    10  tells nobody how a worker ended                       same    `worker_exit` events
    11  can't watch a rank that died twice before a section   same    keeps no state of restarts
    12  starts each rank from nothing, imports included       same    forks it from a warm server
    13  logs every poll and check at INFO                     same    WARNING
    14  waits for ever for a store that is stopped            same    asks in a thread, or dies of SIGALRM
    15  lets a spare, or another node's rank, push out a      partly  survivors are awaited, and keep theirs
        survivor, whose memory holds its state                        also those of a store that was lost
    16  starts a checkpoint worker from nothing               same    forks it (training/writer_server.py)
    17  SIGTERMs a rank's checkpoint worker with the rank     same    the rank alone, which then saves by it
    18  in-process layer dies with the control store          same    waits for it (training/wrapper_store.py)
    19  the control store listens on every address            same    on the one that was asked for

    #   0.7.0 does, and 0.6.0 does not                                here
    20  closes the rendezvous for ever when one address has two       allowed: a launcher that is killed
        slots                                                         while it waits leaves one behind
    21  waits a second more for the last round's nodes, lost ones     15 waits, as long as they are heard
        too                                                           (training/launcher_arguments.py)
    22  asks the store why, when a peer calls for a restart: fails,   there is no reason: nothing here
        or hangs, on a store that was lost just then                  sets one
    23  forgets to give up the slot of a launcher that is told to     6 opens the next round
        stop while it waits
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import socket
import sys
import time
import types
from collections.abc import Callable
from pathlib import Path
from typing import Any, ClassVar

import nvidia_resiliency_ext.fault_tolerance.ft_rendezvous_barrier as barrier
from nvidia_resiliency_ext.fault_tolerance import control_plane, launcher, rank_monitor_server
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.multiprocessing import api as multiprocessing_api
from torch.distributed.elastic.multiprocessing.subprocess_handler import SubprocessHandler

from training import shared_memory
from training.events import EventLog
from training.fork_server import ForkServer, ForkServerLost
from training.nvrx_rendezvous import (
    ControlState,
    RendezvousHandler,
    allow_slots_of_one_address,
    quicken_polls,
)
from training.nvrx_version import check_version
from training.processes import reap_orphans

EXIT_BARRIER_SECONDS = 30
LEFTOVERS_SECONDS = 1.0
EVERY_ADDRESS = ("0.0.0.0", "::")


def apply_to_launcher(events: EventLog, round_file: Path, *, workers: ForkServer | None) -> None:
    """Put the changed agent, rendezvous and stop into this process.

    Args:
        events: Log that takes rounds and worker exits.
        round_file: Where this node notes the round that it works in; outlives the launcher.
        workers: Server that ranks are forked from; None to start them as new programs.
    """
    check_version()
    Agent.events = RendezvousHandler.events = events
    RendezvousHandler.round_file = round_file
    launcher.LocalElasticAgent = Agent
    launcher.terminate_mp_processes = end_process_groups
    _quieten(launcher)
    launcher.is_slurm_job_array = lambda: True  # 5: the branch that exits non-zero
    barrier.FtRendezvousBarrierHandler = RendezvousHandler
    rank_monitor_server.RankMonitorStateMachine = RankMonitorState
    WorkerHandler.server = workers
    setattr(multiprocessing_api, "get_subprocess_handler", WorkerHandler)  # noqa: B010
    quicken_polls()


def apply_to_control(*, launchers: int, linger_seconds: float) -> Callable[[], bool]:
    """Put the changed control plane into this process.

    Args:
        launchers: Launchers of the run, one a node, spares included.
        linger_seconds: Time that late spares get to see the end of the run.

    Returns:
        A function that says whether the run has ended.
    """
    check_version()
    ControlState.launchers = launchers
    ControlState.linger_seconds = linger_seconds
    control_plane._RendezvousBarrierState = ControlState
    control_plane._STORE_READ_GRACE_SECONDS = 0.0  # 9; 0.6.0 has no such thing
    control_plane.TCPStore = store_at
    allow_slots_of_one_address()
    _quieten(control_plane)
    quicken_polls()
    return ControlState.ended.is_set


def store_at(host_name: str, port: int, **options: Any) -> TCPStore:
    """19: who reaches a store can change the run, and TCPStore's own server takes no address."""
    if host_name not in EVERY_ADDRESS:
        family = socket.getaddrinfo(host_name, port, type=socket.SOCK_STREAM)[0][0]
        listening = socket.create_server((host_name, port), family=family)
        options["master_listen_fd"] = listening.detach()
    return TCPStore(host_name, port, **options)


class Agent(launcher.LocalElasticAgent):  # type: ignore[misc]
    """3, 8, 10: stops workers at once, and reports how they ended."""

    events: ClassVar[EventLog]

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **{**kwargs, "exit_barrier_timeout": EXIT_BARRIER_SECONDS})
        self._reported: set[int] = set()

    def _start_workers(self, worker_group: Any) -> dict[int, Any]:
        pids = super()._start_workers(worker_group)
        self._rdzv_handler.note_round(rank=worker_group.group_rank)
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


class WorkerHandler(SubprocessHandler):
    """12, 17: starts `python -m training ...` as a copy of a process that has imported it all."""

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

    def close(self, death_sig: signal.Signals | None = None) -> None:
        if death_sig == signal.SIGTERM:
            self.proc.send_signal(death_sig)
        else:
            super().close(death_sig)


class RankMonitorState(rank_monitor_server.RankMonitorStateMachine):  # type: ignore[misc]
    """11: the state is only for NVRx's log, but a "wrong" transition makes the monitor drop its rank."""

    def handle_heartbeat_msg(self) -> None: ...

    def handle_section_msg(self) -> None: ...

    def handle_ipc_connection_lost(self) -> None: ...

    def handle_signal(self) -> None: ...


def end_process_groups(allowed_pgids: set[int]) -> None:
    """4: stop what workers left behind in their process groups, and wait only while it lives."""
    _signal_groups(allowed_pgids, signal.SIGTERM)
    deadline = time.monotonic() + LEFTOVERS_SECONDS
    while time.monotonic() < deadline and _signal_groups(allowed_pgids, 0):
        _reap_groups(allowed_pgids)
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


def _reap_groups(groups: set[int]) -> None:
    """Collect orphans in process groups, which this launcher adopted: a zombie counts as alive."""
    for group in groups:
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-group, os.WNOHANG)[0]:
                pass


def _quieten(module: types.ModuleType) -> None:
    """13: NVRx sets its level when it makes its logger; set ours right after."""
    setup_logger = module.setup_logger

    def setup(*args: Any, **kwargs: Any) -> logging.Logger:
        logger: logging.Logger = setup_logger(*args, **kwargs)
        logger.setLevel(logging.WARNING)
        return logger

    module.setup_logger = setup  # type: ignore[attr-defined]
