"""Section 2, first half: copies between a GPU and page-locked shared memory, alone and all at once."""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
from torch import Tensor

from bench.multi_gpu import machine
from bench.multi_gpu.ranks import Rank
from training import environment, slots
from training.layout import Place, make_layout
from training.slots import Slot

_GB = 1e9


def measure(rank: Rank) -> list[dict[str, Any]]:
    """Return one row a kind of copy, with every rank's GB/s."""
    rows = []
    state = torch.randint(0, 256, (rank.state_bytes,), dtype=torch.uint8, device=rank.device)
    with _slot_file(rank, state, "copies") as (slot, allocate_seconds):
        rows.append(_set_up(rank, slot, allocate_seconds))
        with _locked(rank, Slot(slot.path, slot.layout)) as host:
            rows.append(_bandwidth(rank, "to host", lambda: host.copy_(state, non_blocking=True)))
            rows.append(_bandwidth(rank, "to device", lambda: state.copy_(host, non_blocking=True)))
    rows.extend(_by_numa_node(rank, state))
    return rows


def _set_up(rank: Rank, slot: Slot, allocate_seconds: float) -> dict[str, Any]:
    """Page-lock a new slot on all ranks at once; then map and lock it again, as a new process does."""
    seconds = [allocate_seconds]
    if rank.on_gpu:
        seconds.append(_seconds_to_lock(rank, slot))
    slot.close()
    if rank.on_gpu:
        again = Slot(slot.path, slot.layout)
        seconds.append(_seconds_to_lock(rank, again))
        again.close()
    names = ("allocate", "lock_first", "lock_again")
    told = rank.gather([rank.state_bytes / _GB / spent for spent in seconds])
    rates = zip(names, zip(*told, strict=True), strict=False)
    return {
        "what": "slot set-up, all at once",
        "ranks": rank.count,
        **{f"{name}_gbps": _rounded(values) for name, values in rates},
    }


def _seconds_to_lock(rank: Rank, slot: Slot) -> float:
    rank.meet()
    start = time.perf_counter()
    slot.lock_pages()
    return time.perf_counter() - start


def _bandwidth(rank: Rank, what: str, copy: Callable[[], object]) -> dict[str, Any]:
    alone = 0.0
    for turn in range(rank.count):
        rank.meet()
        if turn == rank.number:
            alone = rank.state_bytes / _GB / rank.seconds(copy)
    rank.meet()
    together = rank.state_bytes / _GB / rank.seconds(copy, repeats=8)
    told = rank.gather((alone, together))
    return {
        "what": what,
        "ranks": rank.count,
        "alone_gbps": _rounded(row[0] for row in told),
        "together_gbps": _rounded(row[1] for row in told),
        "sum_gbps": round(sum(row[1] for row in told), 1),
    }


def _by_numa_node(rank: Rank, state: Tensor) -> Iterator[dict[str, Any]]:
    """Measure with memory of each NUMA node in turn (it lies where it is touched first)."""
    own = _own_numa_node(rank)
    before = os.sched_getaffinity(0)
    for node, cpus in machine.numa_nodes().items():
        usable = before & set(cpus)
        told = rank.gather(bool(usable))
        if not all(told):
            continue
        os.sched_setaffinity(0, usable)
        part = state[: len(state) // 4]
        with _slot_file(rank, part, f"numa-{node}") as (slot, _), _locked(rank, slot) as host:
            rank.meet()
            rate = len(part) / _GB / rank.seconds(partial(host.copy_, part, non_blocking=True))
            rank.meet()
        os.sched_setaffinity(0, before)
        found = rank.gather((own, rate))
        yield {
            "what": f"to host, memory of NUMA node {node}",
            "ranks": rank.count,
            "numa_nodes_of_gpus": [row[0] for row in found],
            "together_gbps": _rounded(row[1] for row in found),
        }


def _own_numa_node(rank: Rank) -> int:
    if not rank.on_gpu:
        return -1
    properties = torch.cuda.get_device_properties(rank.device)
    domain, bus, device = (getattr(properties, f"pci_{name}_id", 0) for name in ("domain", "bus", "device"))
    return machine.gpu_numa_node(f"{domain:04x}:{bus:02x}:{device:02x}.0")


@contextmanager
def _slot_file(rank: Rank, tensor: Tensor, name: str) -> Iterator[tuple[Slot, float]]:
    """Make a slot of the product's own kind; also yields the seconds that it took. Close it yourself."""
    layout = make_layout({"state": tensor}, Place(shard=rank.number, shards=rank.count))
    directory = environment.shared_memory() / f"bench-{name}-{rank.number}-{os.getpid()}"
    rank.meet()
    start = time.perf_counter()
    slot = Slot.make(directory / "0.slot", layout, slots.describe("bench", layout))
    seconds = time.perf_counter() - start
    try:
        yield slot, seconds
    finally:
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _locked(rank: Rank, slot: Slot) -> Iterator[Tensor]:
    """Yield the slot's memory of the state, page-locked."""
    if rank.on_gpu:
        slot.lock_pages()
    try:
        yield slot.view(slot.layout.pieces[0])
    finally:
        rank.wait()
        slot.close()


def _rounded(values: Iterator[float] | Sequence[float]) -> list[float]:
    return [round(value, 1) for value in values]
