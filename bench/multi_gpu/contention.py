"""Section 2, second half: what a snapshot per step costs, by the length of forward and backward.

The step is made of matrix products whose number is chosen, so that it is shorter or longer than the copy;
everything else (slots, fingerprints, copy stream, order behind the optimizer) is the product's.
"""

from __future__ import annotations

import os
import shutil
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.multi_gpu.ranks import Rank
from training import environment
from training.events import EventLog
from training.layout import Place
from training.slots import NOTES, Mark, run_directory
from training.snapshot import Snapshots

_PIECES = 400
_WIDTH = 8192
_STEPS = 12
# length of forward and backward, as a share of the copy
_SHARES = (0.5, 0.8, 1.0, 1.2, 1.5, 2.0)


def measure(rank: Rank) -> list[dict[str, Any]]:
    """Return one row for each length of a step, with one rank and with all at once."""
    if not rank.on_gpu:
        return list(_measure(rank, active=rank.count, shares=(1.0,), width=64))
    rows: list[dict[str, Any]] = []
    for active in sorted({1, rank.count}):
        rows.extend(_measure(rank, active=active, shares=_SHARES, width=_WIDTH))
    return rows


def _measure(rank: Rank, *, active: int, shares: tuple[float, ...], width: int) -> Iterator[dict[str, Any]]:
    with _snapshots(rank, active) as (snapshots, tensors):
        loop = _Loop(rank, snapshots, tensors, width=width)
        runs = rank.number < active
        copy_seconds = _slowest(rank, loop.copy_seconds() if runs else 0.0)
        product_seconds = _slowest(rank, loop.product_seconds() if runs else 0.0)
        for share in shares:
            loop.products = max(1, round(share * copy_seconds / product_seconds))
            rank.meet()
            plain = _slowest(rank, loop.seconds_per_step(snapshot=False) if runs else 0.0)
            rank.meet()
            costly = _slowest(rank, loop.seconds_per_step(snapshot=True) if runs else 0.0)
            yield {
                "ranks": active,
                "state_gb_per_rank": round(rank.state_bytes / 1e9, 2),
                "copy_ms": round(1e3 * copy_seconds, 2),
                "copy_gbps_per_rank": round(rank.state_bytes / 1e9 / copy_seconds, 1),
                "forward_backward_ms": round(1e3 * loop.products * product_seconds, 2),
                "step_ms": round(1e3 * plain, 2),
                "step_with_snapshot_ms": round(1e3 * costly, 2),
            }


class _Loop:
    """A training step that is all matrix products, and an optimizer that changes every tensor."""

    def __init__(self, rank: Rank, snapshots: Snapshots, tensors: list[Tensor], *, width: int) -> None:
        self._rank, self._snapshots, self._tensors = rank, snapshots, tensors
        shape = (width, width)
        dtype = torch.bfloat16 if rank.on_gpu else torch.float32
        self._left, self._right = (torch.randn(shape, device=rank.device, dtype=dtype) for _ in range(2))
        self._out = torch.empty_like(self._left)
        self._notes = torch.zeros(NOTES, dtype=torch.float64, device=rank.device)
        self._step = 0
        self.products = 1

    def copy_seconds(self) -> float:
        """Return the time of a snapshot beside which nothing runs."""

        def snapshot() -> None:
            self._take()
            self._snapshots.before_optimizer_step()

        return self._rank.seconds(snapshot, repeats=4)

    def product_seconds(self) -> float:
        def products() -> None:
            for _ in range(20):
                torch.mm(self._left, self._right, out=self._out)

        return self._rank.seconds(products) / 20

    def seconds_per_step(self, *, snapshot: bool) -> float:
        """Return the mean time of a step; the host stays a step ahead of the device, as in the trainer."""
        before: Callable[[], object] = _wait_for_nothing
        for number in range(_STEPS + 2):
            if number == 2:
                self._rank.wait()
                start = time.perf_counter()
            self._run_step(snapshot=snapshot)
            before()
            before = self._mark_device()
        self._rank.wait()
        return (time.perf_counter() - start) / _STEPS

    def _run_step(self, *, snapshot: bool) -> None:
        for _ in range(self.products):
            torch.mm(self._left, self._right, out=self._out)
        self._snapshots.before_optimizer_step()
        torch._foreach_add_(self._tensors, 1.0)
        if snapshot:
            self._take()

    def _take(self) -> None:
        self._step += 1
        if not self._snapshots.take(Mark(lineage=1, step=self._step, position=self._step), self._notes):
            raise RuntimeError("no slot is free")

    def _mark_device(self) -> Callable[[], object]:
        if not self._rank.on_gpu:
            return _wait_for_nothing
        reached = torch.cuda.current_stream().record_event()
        return lambda: reached.synchronize()


def _wait_for_nothing() -> None:
    """A CPU has done its work when the call returns."""


@contextmanager
def _snapshots(rank: Rank, active: int) -> Iterator[tuple[Snapshots, list[Tensor]]]:
    """Yield the product's snapshots of tensors that together have the wanted size."""
    words = rank.state_bytes // 4 // _PIECES
    tensors = {f"{n:04}": torch.zeros(words, device=rank.device) for n in range(_PIECES)}
    run, node = f"bench-contention-{active}", f"rank-{rank.number}"
    log = Path(environment.shared_memory()) / f"bench-events-{os.getpid()}"
    with EventLog(log, role="rank", node=node, rank=rank.number) as events:
        snapshots = Snapshots(count=4, ranks_per_node=active, device=rank.device, events=events, node=node)
        snapshots.prepare(run, tensors, Place(shard=rank.number, shards=rank.count))
        try:
            if rank.number < active:
                snapshots.wait_ready()
            rank.meet()
            yield snapshots, list(tensors.values())
        finally:
            rank.wait()
            snapshots.close(sweep=True)
            shutil.rmtree(run_directory(run, node), ignore_errors=True)
            shutil.rmtree(log, ignore_errors=True)


def _slowest(rank: Rank, seconds: float) -> float:
    """Return the longest time of all ranks: training waits for it."""
    longest = torch.tensor([seconds], dtype=torch.float64)
    dist.all_reduce(longest, op=dist.ReduceOp.MAX)
    return float(longest)
