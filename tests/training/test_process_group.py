from __future__ import annotations

import os

import pytest
import torch
import torch.distributed as dist
from torch._C._distributed_c10d import TCPStore

from tests.ranks import run_ranks
from training import environment
from training.config import RecoveryConfig
from training.errors import RunError
from training.process_group import close_group, connect_store, generation, open_group, open_mesh

CPU = torch.device("cpu")
CONFIG = RecoveryConfig(layers="none", group_timeout_seconds=7.0)


def on_control_store(port: int) -> list[float]:
    """Make three groups one after the other, as three in-process iterations do."""
    os.environ[environment.CONTROL] = f"127.0.0.1:{port}"
    sums = []
    for iteration in range(3):
        open_group(CPU, iteration=iteration, config=CONFIG)
        value = torch.tensor(float(dist.get_rank() + iteration))
        dist.all_reduce(value)
        sums.append(float(value))
        close_group()
    return sums


def test_groups_follow_each_other_on_a_store_outside_of_the_ranks() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set("exception_dump", "left by a rank that failed")
    assert run_ranks(2, on_control_store, store.port) == [[1.0, 3.0, 5.0]] * 2
    assert not store.check(["exception_dump"])


def under_a_launcher(iterations: int) -> float:
    value = torch.zeros(())
    for iteration in range(iterations):
        open_group(CPU, iteration=iteration, config=CONFIG)
        value = torch.tensor(1.0)
        dist.all_reduce(value)
        close_group()
    return float(value)


def test_group_without_a_control_store() -> None:
    assert run_ranks(2, under_a_launcher, 1) == [2.0, 2.0]


def alone() -> tuple[int, float]:
    for name in ("RANK", "WORLD_SIZE", "MASTER_ADDR", "MASTER_PORT"):
        os.environ.pop(name)
    return dist.get_world_size() if dist.is_initialized() else 0, under_a_launcher(2)


def test_process_that_no_launcher_started() -> None:
    assert run_ranks(1, alone) == [(0, 1.0)]


def without_a_peer(port: int) -> str:
    os.environ[environment.CONTROL] = f"127.0.0.1:{port}"
    os.environ["WORLD_SIZE"] = "3"
    config = RecoveryConfig(layers="none", setup_timeout_seconds=10.0)
    with pytest.raises(RunError) as caught:
        open_group(CPU, iteration=0, config=config)
    return str(caught.value)


def test_missing_ranks_are_named() -> None:
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    messages = run_ranks(2, without_a_peer, store.port)
    assert messages == [messages[0]] * 2
    assert "recovery.setup_timeout_seconds=10: ranks [2] did not come to the process group" in messages[0]


def mesh_timeouts() -> list[float]:
    open_group(CPU, iteration=0, config=CONFIG)
    mesh = open_mesh(CPU, (2, 2), names=("replicate", "shard"), config=CONFIG)
    backends = [group._get_backend(CPU) for group in mesh.get_all_groups()]
    timeouts = [backend.options._timeout.total_seconds() for backend in backends]
    close_group()
    return timeouts


def test_groups_of_a_mesh_have_the_timeout_of_the_recipe() -> None:
    """DeviceMesh alone gives them half an hour."""
    assert run_ranks(4, mesh_timeouts) == [[7.0, 7.0]] * 4


def test_rounds_differ_in_their_keys(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "run")
    names = set()
    for round_number in ("0", "1"):
        monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", round_number)
        names.add(generation())
    assert len(names) == 2


def test_store_of_a_process_alone_is_its_own(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.CONTROL, raising=False)
    monkeypatch.delenv("RANK", raising=False)
    connect_store().set("key", "value")
    assert connect_store().get("key") == b"value"
