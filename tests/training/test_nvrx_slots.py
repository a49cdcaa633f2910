"""Which of the launchers that have a slot in a round get its ranks, beside what NVRx does."""

from __future__ import annotations

import contextlib
import threading
from typing import Any

import pytest
from nvidia_resiliency_ext.fault_tolerance import ft_rendezvous_barrier as barrier
from torch._C._distributed_c10d import TCPStore
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousGracefulExitError

from tests.training.stores import make_store, until
from training import nvrx_rendezvous
from training.nvrx_rendezvous import ControlState, keep_ranks

NODES = [barrier._NodeDesc("127.0.0.1", pid, 0) for pid in range(4)]


@pytest.mark.parametrize(
    ("nodes", "last", "ranks"),
    [
        ([0, 1, 2], {}, {0: 0, 1: 1}),
        ([0, 1, 2], {0: 0, 1: 1}, {0: 0, 1: 1}),
        ([1, 2], {0: 0, 1: 1}, {1: 1, 2: 0}),
        ([0, 1, 2], {1: 1, 2: 0}, {1: 1, 2: 0}),
        ([0, 3], {1: 1, 2: 0}, {0: 0, 3: 1}),
    ],
)
def test_survivors_keep_their_ranks(nodes: list[int], last: dict[int, int], ranks: dict[int, int]) -> None:
    assert keep_ranks(nodes, last, world_size=2) == ranks


def participant(slot: Any, node: int) -> Any:
    """Return what NVRx of the installed version reads from a slot: 0.7.0 adds a field."""
    information = barrier.RendezvousParticipantInfo
    return information.unpack(information.pack(slot, node))


def join(state: Any, *nodes: int) -> list[Any]:
    return [participant(NODES[node], node) for node in nodes]


def test_spare_pushes_out_a_survivor_in_nvrx() -> None:
    """GIVEN nodes 1 and 2 at work WHEN spare 0 is back first THEN NVRx starts without node 2."""
    state = barrier._RendezvousBarrierState(make_store(), "run", is_store_host=True)
    assert state._can_meet_segment_constraint(join(state, 0, 1), 2)
    assigned = state._assign_group_ranks(join(state, 0, 1, 2), 2)
    assert [assigned[NODES[node]] for node in (0, 1, 2)] == [0, 1, 2]


def test_survivors_are_awaited_and_keep_their_ranks() -> None:
    state = ControlState(make_store(), "run", is_store_host=True)
    state._ranks = {1: 1, 2: 0}
    assert not state._can_meet_segment_constraint(join(state, 0, 1), 2)
    assert state._can_meet_segment_constraint(join(state, 0, 1, 2), 2)
    assigned = state._assign_group_ranks(join(state, 0, 1, 2), 2)
    assert [assigned[NODES[node]] for node in (0, 1, 2)] == [2, 1, 0]


def test_survivors_are_awaited_no_longer_than_the_last_call(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(nvrx_rendezvous, "LAST_CALL_SECONDS", 0.2)
    state = ControlState(make_store(), "run", is_store_host=True)
    state._ranks = {1: 1, 2: 0}
    assert not state._can_meet_segment_constraint(join(state, 0, 1), 2)
    assert until(lambda: state._can_meet_segment_constraint(join(state, 0, 1), 2))
    assigned = state._assign_group_ranks(join(state, 0, 1), 2)
    assert [assigned[NODES[node]] for node in (0, 1)] == [0, 1]


def test_slot_that_a_dead_launcher_left_behind_counts_for_nothing() -> None:
    """GIVEN node 0 twice, its first launcher being dead THEN NVRx gives up, and we take the second."""
    ghost, live = NODES[2], NODES[0]
    twice = [participant(ghost, 0), participant(live, 0)]
    nvrx = barrier._RendezvousBarrierState(make_store(), "run", is_store_host=True)
    with pytest.raises(RuntimeError, match="Duplicate"):
        nvrx._assign_group_ranks(twice, 2)
    state = ControlState(make_store(), "run", is_store_host=True)
    assert not state._can_meet_segment_constraint(twice, 2)
    assigned = state._assign_group_ranks([*twice, participant(NODES[1], 1)], 2)
    assert assigned == {live: 0, NODES[1]: 1, ghost: 2}


def take_slot(monkeypatch: pytest.MonkeyPatch, store: TCPStore, slot: Any, node: int) -> Any:
    """Have a launcher of a node join round 0; return the list that takes the rank that it gets."""
    client = TCPStore("127.0.0.1", store.port, is_master=False, wait_for_workers=False)
    state, ranks = barrier._RendezvousBarrierState(client, "run"), list[int]()
    before = store.add(state.join_count_key, 0)
    monkeypatch.setenv("GROUP_RANK", str(node))

    def wait() -> None:
        with contextlib.suppress(RendezvousClosedError, RendezvousGracefulExitError):
            ranks.append(state.perform_rendezvous(slot, 2, 1000)[0])

    thread = threading.Thread(target=wait)
    thread.start()
    rank_key = f"{state.prefix}:slot_{before + 1}"
    assert until(lambda: store.check([rank_key]))
    return thread, ranks


@pytest.mark.parametrize(
    ("kind", "places"), [(barrier._RendezvousBarrierState, [[], [], []]), (ControlState, [[], [0], [1]])]
)
def test_launcher_killed_while_it_waits_costs_nothing(
    monkeypatch: pytest.MonkeyPatch, kind: type[Any], places: list[list[int]]
) -> None:
    """GIVEN node 0 with two slots at its address, the first a dead launcher's THEN only NVRx fails.

    0.6.0 fails for the node's number, 0.7.0 closes the rendezvous for ever.
    """
    monkeypatch.setenv("NVRX_ENABLE_MULTI_LAUNCHERS_PER_NODE", "0")
    if kind is ControlState:
        nvrx_rendezvous.allow_slots_of_one_address()
    store = make_store()
    control = kind(store, "run", is_store_host=True)
    launchers = [
        take_slot(monkeypatch, store, slot, node)
        for slot, node in [(NODES[2], 0), (NODES[0], 0), (barrier._NodeDesc("127.0.0.2", 1, 0), 1)]
    ]
    with contextlib.suppress(RendezvousClosedError, RuntimeError):
        control.close_current_round_as_host(NODES[3], 2, 1000, stop_event=threading.Event())
        assert until(lambda: [ranks for _, ranks in launchers] == places)
    control.set_shutdown()
    for thread, _ in launchers:
        thread.join(30)
    assert [ranks for _, ranks in launchers] == places
