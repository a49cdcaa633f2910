"""Process groups on a store that no rank hosts, with the timeouts of the recipe.

Under `training launch` the store is the control store (`training control`), so the loss of any rank,
rank 0 included, takes no store along. Under torchrun, or alone, the launcher's own store is used.
Every group gets a key prefix of its own: one store outlives many groups.
"""

from __future__ import annotations

import os
import time
from collections.abc import Callable
from datetime import timedelta

import torch
import torch.distributed as dist
from torch._C._distributed_c10d import HashStore, PrefixStore, Store, TCPStore
from torch.distributed.device_mesh import DeviceMesh, init_device_mesh
from torch.distributed.distributed_c10d import _set_pg_timeout
from torch.distributed.rendezvous import rendezvous

from training import environment
from training.config import RecoveryConfig
from training.errors import RunError

STORE_TIMEOUT_SECONDS = 60.0
_POLL_SECONDS = 0.02
_alone = HashStore()


def rank_and_world() -> tuple[int, int]:
    """Return this process's rank and the number of ranks; 0 and 1 where no launcher has set them."""
    return int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))


def open_group(
    device: torch.device,
    *,
    iteration: int,
    config: RecoveryConfig,
    meanwhile: Callable[[], None] = lambda: None,
) -> None:
    """Make the default process group.

    Args:
        device: Device of this rank.
        iteration: In-process restart that the group is for.
        config: Timeouts.
        meanwhile: Called when all ranks have come, while they make the group.

    Raises:
        RunError: Some ranks did not come within `setup_timeout_seconds`.
    """
    rank, world_size = rank_and_world()
    store = PrefixStore(f"{generation()}/group/{iteration}", connect_store())
    # gloo's own rendezvous waits no longer than the group timeout, which is short on CPU
    _wait_for_all(store, rank, world_size, seconds=config.setup_timeout_seconds)
    meanwhile()
    dist.init_process_group(
        backend="cpu:gloo,cuda:nccl" if device.type == "cuda" else "gloo",
        store=store,
        rank=rank,
        world_size=world_size,
        timeout=timedelta(seconds=config.group_timeout_seconds),
        device_id=device if device.type == "cuda" else None,
    )


def close_group() -> None:
    """Destroy all process groups, if there are any."""
    if dist.is_initialized():
        dist.destroy_process_group()


def open_mesh(
    device: torch.device, shape: tuple[int, ...], *, names: tuple[str, ...], config: RecoveryConfig
) -> DeviceMesh:
    """Make a device mesh whose groups have the recipe's timeout.

    DeviceMesh gives its groups torch's default (30 minutes for gloo, 10 for NCCL), whatever
    `init_process_group` was told, and a lost peer is then noticed only after that.
    """
    mesh = init_device_mesh(device.type, shape, mesh_dim_names=names)
    for group in mesh.get_all_groups():
        _set_pg_timeout(timedelta(seconds=config.group_timeout_seconds), group)
    return mesh


def connect_store() -> Store:
    """Return a new client of the run's store."""
    endpoint = environment.control_endpoint()
    timeout = timedelta(seconds=STORE_TIMEOUT_SECONDS)
    if endpoint is not None:
        store = TCPStore(*endpoint, is_master=False, wait_for_workers=False, timeout=timeout)
        # A rank that fails leaves this flag below all prefixes; a later healthy job that reads it
        # aborts itself (facts: nccl_two_gpus.md, section 5).
        store.delete_key("exception_dump")
        return store
    if "RANK" not in os.environ:
        return _alone
    found: Store = next(iter(rendezvous("env://", timeout=timeout)))[0]
    return found


def generation() -> str:
    """Return a key prefix that is the same on all ranks of a round and differs between rounds."""
    run = os.environ.get("TORCHELASTIC_RUN_ID", "alone")
    round_number = os.environ.get("TORCHELASTIC_RESTART_COUNT", "0")
    return f"holdfast/{run}/{round_number}/{os.environ.get('MASTER_PORT', '0')}"


def _wait_for_all(store: Store, rank: int, world_size: int, *, seconds: float) -> None:
    keys = [f"arrived/{peer}" for peer in range(world_size)]
    store.set(keys[rank], "")
    deadline = time.monotonic() + seconds
    # Polled, not waited for: a wait in C++ keeps the hang detection's heartbeat from running, and torch
    # prints a warning with a stack for each wait that times out.
    while not store.check(keys):
        if time.monotonic() > deadline:
            missing = [peer for peer in range(world_size) if not store.check([keys[peer]])]
            raise RunError(
                f"recovery.setup_timeout_seconds={seconds:g}: ranks {missing} did not come to the "
                "process group; see why they did not start, or raise it"
            )
        time.sleep(_POLL_SECONDS)
