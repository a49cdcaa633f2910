"""NVRx's rendezvous with Holdfast's changes, on both sides of the control store.

The list of changes, by number, is in training/nvrx_changes.py.
"""

from __future__ import annotations

import contextlib
import dataclasses
import json
import os
import signal
import threading
import time
import types
import uuid
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, ClassVar

import nvidia_resiliency_ext.fault_tolerance.ft_rendezvous_barrier as barrier
import torch.distributed as dist
from nvidia_resiliency_ext.fault_tolerance import c10d_monkey_patch
from torch.distributed.elastic.agent.server.api import WorkerState
from torch.distributed.elastic.rendezvous import api as rendezvous

from training.control_watch import STORE_ID_KEY, ControlWatch
from training.events import EventLog

POLL_SECONDS = 0.05
# Longest call to the store in a rendezvous; its answers come in milliseconds.
STORE_CALL_SECONDS = 30.0
NODE_LOST_SECONDS = 3.0
# When no node is heard at all, the control's own network is the likelier cause.
ALL_LOST_SECONDS = 10.0
# Time that a survivor gets to come back before a spare takes its place: what is in its memory is newer
# than any checkpoint, and a killed launcher is replaced within this.
LAST_CALL_SECONDS = 3.0
# The same at a control store that is new: all launchers see that, and exit, before they come back. A run
# that starts with a spare missing waits as long.
CLAIM_SECONDS = 10.0
LOOK_SECONDS = 0.25
# A look that comes later than this was not late for the nodes: this process was stopped, or starved.
LATE_LOOK_SECONDS = 1.5


class ControlReturned(Exception):
    """A new control store is in the place of a lost one: a fresh launcher must replace this one."""

    raised = False

    def __init__(self) -> None:
        super().__init__("the control store is a new one: forming a new round")
        ControlReturned.raised = True


class RendezvousHandler(barrier.FtRendezvousBarrierHandler):  # type: ignore[misc]
    """1, 2, 6, 7, 14, 22: survives a lost control store, and never closes a rendezvous that others need."""

    events: ClassVar[EventLog]
    round_file: ClassVar[Path]
    _watch: ControlWatch
    _lost_since: float | None = None

    def __init__(self, node: Any, *args: Any, **kwargs: Any) -> None:
        _disarm()
        super().__init__(dataclasses.replace(node, local_id=_node_index()), *args, **kwargs)

    def is_next_round_open(self) -> bool:
        """Say whether a peer has called for a restart; a store that is gone has no peers' calls.

        Raises:
            ControlReturned: A new store is in the lost one's place. Reconnecting to it is no way: it
                begins at round 0 while this launcher is at N, so all launchers start afresh.
        """
        if self._watch.is_replaced():
            raise ControlReturned
        problem = self._watch.problem()
        if problem is not None:
            self._note_loss(problem)
            return False
        self._note_answer()
        return self._watch.is_set(f"{self._barrier_state.prefix}:round_done_{self.round() + 1}")

    def shutdown(self, *args: Any, **kwargs: Any) -> bool:
        agent = self._agent
        if agent is not None and agent._worker_group.state is WorkerState.SUCCEEDED:
            return bool(super().shutdown(*args, **kwargs))
        return True

    def no_restart_reason(self) -> None:
        """22: 0.7.0's reasons are its breaker and its log analysis, neither of which is in use here."""

    def note_round(self, *, rank: int) -> None:
        """Write down the round that this node works in, and its rank, for a launcher that takes over."""
        self.round_file.write_text(f"{self._round_name(self.round())}\n{rank}")

    def finish(self) -> None:
        """Tell the control that this node's workers are done, so that its silence is no loss."""
        with contextlib.suppress(RuntimeError):  # the end needs no control store
            self._store.set(finished_key(self._barrier_state.run_id, self.round(), _node_index()), "")

    def _perform_rendezvous(self) -> None:
        with _bounded_store_calls():
            try:
                super()._perform_rendezvous()
            except dist.DistNetworkError as error:
                barrier.log.warning("control store lost in a rendezvous: %s", str(error).splitlines()[0])
                raise ControlReturned from error

    def _complete_initialization(self) -> None:
        super()._complete_initialization()
        state, path = self._barrier_state, self.round_file
        self._watch = ControlWatch(self._store, heartbeat_key=heartbeat_key(state.run_id, _node_index()))
        last_round = state._round - 1
        noted, _, rank = path.read_text().partition("\n") if path.exists() else ("", "", "")
        if rank:
            claim = {"rank": int(rank), "round": noted, "time": path.stat().st_mtime}
            self._store.set(claim_key(state.run_id, _node_index()), json.dumps(claim))
        if noted == self._round_name(last_round):
            barrier.log.warning("an earlier launcher of this node ended in round %d", last_round)
            state.store.compare_set(state.round_done_key, "", "0")

    def _round_name(self, number: int) -> str:
        return f"{self._watch.store_id}:{number}"

    def _note_loss(self, problem: str) -> None:
        if self._lost_since is None:
            self._lost_since = time.time()
            self.events.emit("control_lost", message=problem)
            barrier.log.warning("control store lost, training goes on without it: %s", problem)

    def _note_answer(self) -> None:
        if self._lost_since is None:
            return
        self._store = self._barrier_state.store = self._watch.store
        if self._agent is not None:
            self._agent._store = self._get_store()
        self.events.emit("control_answers", seconds=time.time() - self._lost_since)
        barrier.log.warning("the control store answers again and has lost nothing: going on with it")
        self._lost_since = None


class ControlState(barrier._RendezvousBarrierState):  # type: ignore[misc]
    """6, 9, 15: opens a round when a node falls silent, keeps survivors' ranks, and knows the end."""

    ended: ClassVar[threading.Event] = threading.Event()
    linger_seconds: ClassVar[float] = 0.0
    launchers: ClassVar[int] = 1

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        super().__init__(*args, **kwargs)
        self.store.set(STORE_ID_KEY, uuid.uuid4().hex)
        self._ranks: Mapping[int, int] = {}
        self._hearing = Hearing()
        self._last_call: float | None = None

    def close_current_round_as_host(self, *args: Any, stop_event: threading.Event, **kwargs: Any) -> int:
        self._last_call = None
        try:
            return int(super().close_current_round_as_host(*args, stop_event=stop_event, **kwargs))
        except (rendezvous.RendezvousClosedError, rendezvous.RendezvousGracefulExitError):
            if self.is_shutdown():
                self.ended.set()
                stop_event.wait(self.linger_seconds)
            raise

    def is_shutdown(self) -> bool:
        # NVRx asks this once in every poll while it waits for a round: the one place to look around.
        if self._ranks:
            self._hearing.look(self.store, {n: heartbeat_key(self.run_id, n) for n in self._ranks})
            self._open_round_for_silent_nodes()
        return bool(super().is_shutdown())

    def _open_round_for_silent_nodes(self) -> None:
        if self.store.check([self.round_done_key]):
            return
        silent = self._silent_nodes()
        if silent:
            barrier.log.warning("no heartbeat of nodes %s in round %d", silent, self._round - 1)
            self.store.set(self.round_done_key, "0")

    def _silent_nodes(self) -> list[int]:
        finished = [n for n in self._ranks if self.store.check([self._finished_key(n)])]
        silences = {n: self._hearing.silence_seconds(n) for n in self._ranks if n not in finished}
        all_silent = min(silences.values(), default=0.0) > NODE_LOST_SECONDS
        limit = ALL_LOST_SECONDS if all_silent else NODE_LOST_SECONDS
        return [node for node, seconds in silences.items() if seconds > limit]

    def _finished_key(self, node: int) -> str:
        return finished_key(self.run_id, self._round - 1, node)

    def _can_meet_segment_constraint(self, participants: Sequence[Any], world_size: int) -> bool:
        # one node may have two slots: a launcher that dies while it waits leaves its own behind
        nodes = {participant[1] for participant in participants}
        if len(nodes) < world_size or not super()._can_meet_segment_constraint(participants, world_size):
            return False
        if self._are_survivors_there(nodes, world_size):
            return True
        now = time.monotonic()
        self._last_call = self._last_call or now + (LAST_CALL_SECONDS if self._ranks else CLAIM_SECONDS)
        return now > self._last_call

    def _are_survivors_there(self, nodes: Collection[int], world_size: int) -> bool:
        if self._ranks:
            missing = [n for n in self._ranks if n not in nodes]
            return all(self._hearing.silence_seconds(n) > NODE_LOST_SECONDS for n in missing)
        return len(nodes) >= self.launchers or len(self._claims(nodes)) == world_size

    def _claims(self, nodes: Iterable[int]) -> dict[int, int]:
        """Return {node: rank} as launchers tell it to a store that is new.

        A node that a spare has replaced may come back first: only what was said in the last round counts.
        """
        keys = {node: claim_key(self.run_id, node) for node in nodes}
        claims = {n: json.loads(self.store.get(key)) for n, key in keys.items() if self.store.check([key])}
        last = max(claims.values(), key=lambda claim: float(claim["time"]), default={"round": ""})
        return {node: claim["rank"] for node, claim in claims.items() if claim["round"] == last["round"]}

    def _assign_group_ranks(
        self,
        participants: Sequence[Any],
        world_size: int,
        standby_only_participants: Sequence[Any] | None = None,  # 0.7.0
    ) -> dict[Any, int]:
        newest = {participant[1]: participant[0] for participant in participants}
        last = self._ranks or self._claims(newest)
        self._ranks = keep_ranks(sorted(newest), last, world_size=world_size)
        self._hearing = Hearing()
        assigned = {newest[node]: rank for node, rank in self._ranks.items()}
        rest = [p[0] for p in (*participants, *(standby_only_participants or ())) if p[0] not in assigned]
        return assigned | {node: world_size + index for index, node in enumerate(rest)}


class Hearing:
    """When each node was last heard."""

    def __init__(self) -> None:
        self._beats: dict[int, tuple[bytes, float]] = {}
        self._looked = time.monotonic()

    def look(self, store: Any, keys: Mapping[int, str]) -> None:
        """Read the nodes' counters, unless that was done just now."""
        now = time.monotonic()
        gap = now - self._looked
        if gap < LOOK_SECONDS:
            return
        if gap > LATE_LOOK_SECONDS:
            self._beats = {node: (beat, since + gap) for node, (beat, since) in self._beats.items()}
        self._looked = now
        for node, key in keys.items():
            beat = store.get(key) if store.check([key]) else b""
            if beat != self._beats.get(node, (None, 0.0))[0]:
                self._beats[node] = (beat, now)

    def silence_seconds(self, node: int) -> float:
        return self._looked - self._beats.get(node, (b"", self._looked))[1]


def keep_ranks(nodes: Sequence[int], last: Mapping[int, int], *, world_size: int) -> dict[int, int]:
    """Return {node: rank}: survivors keep theirs, for their memory holds its state; spares fill the gaps.

    Args:
        nodes: All that are there, in the order in which they are taken.
        last: The same of the round before.
        world_size: Number of ranks.
    """
    kept = {node: last[node] for node in nodes if node in last}
    free = iter(rank for rank in range(world_size) if rank not in kept.values())
    return kept | dict(zip((node for node in nodes if node not in last), free, strict=False))


def heartbeat_key(run_id: str, node: int) -> str:
    """Return the key that counts the heartbeats of a node's launcher."""
    return f"holdfast/heartbeat/{run_id}/{node}"


def claim_key(run_id: str, node: int) -> str:
    """Return the key under which a launcher tells the rank that its node had before it."""
    return f"holdfast/claim/{run_id}/{node}"


def finished_key(run_id: str, round_number: int, node: int) -> str:
    """Return the key that says that a node's ranks have ended well."""
    return f"holdfast/finished/{run_id}/{round_number}/{node}"


def allow_slots_of_one_address() -> None:
    """20: by the switch that 0.7.0 has for simulations; `ControlState` takes the newest slot of a node."""
    os.environ["NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE"] = "1"


def quicken_polls() -> None:
    """4: NVRx's polls go through the `time` of their own module, which is replaced there only."""
    barrier.time = types.SimpleNamespace(sleep=_sleep, monotonic=time.monotonic, time=time.time)
    wait_for_server = c10d_monkey_patch._wait_for_tcp_store_server

    def wait(host: str, port: int, max_wait_seconds: float) -> None:
        wait_for_server(host, port, max_wait_seconds, probe_interval_seconds=2 * POLL_SECONDS)
        _arm()  # until the handler is made: a stopped store accepts a client and answers nothing

    c10d_monkey_patch._wait_for_tcp_store_server = wait
    barrier._RendezvousBarrierState._compute_step2_poll_interval = staticmethod(
        lambda min_nodes, segment_check_interval: POLL_SECONDS
    )


@contextlib.contextmanager
def _bounded_store_calls() -> Iterator[None]:
    """14: have the kernel end this launcher when a call to the store takes too long; polls start it anew.

    No thread or handler of Python's could end such a call. There are no ranks in a rendezvous.
    """
    _arm()
    try:
        yield
    finally:
        _disarm()


def _sleep(seconds: float) -> None:
    if signal.getitimer(signal.ITIMER_REAL)[0]:
        _arm()
    time.sleep(min(seconds, POLL_SECONDS))


def _arm() -> None:
    signal.setitimer(signal.ITIMER_REAL, STORE_CALL_SECONDS)


def _disarm() -> None:
    signal.setitimer(signal.ITIMER_REAL, 0.0)


def _node_index() -> int:
    return int(os.environ.get("GROUP_RANK", "0"))
