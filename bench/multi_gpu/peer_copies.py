"""Section 5: a flat buffer from GPU to GPU, verified where it arrives, and what the fingerprint costs."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from bench.multi_gpu.ranks import Rank
from training.integrity import Fingerprinter, fingerprinter

_GB = 1e9


def measure(rank: Rank) -> list[dict[str, Any]]:
    """Return one row a kind of transfer, as rank 1 (the receiver) sees it."""
    size = 2 * rank.state_bytes
    ours = torch.randint(0, 256, (size // 4 * 4,), dtype=torch.uint8, device=rank.device)
    rows = [_fingerprint_cost(rank, ours)]
    if rank.count < 2:
        return rows
    theirs = torch.empty_like(ours)
    take = fingerprinter([ours if rank.number == 0 else theirs], rank.device)
    transfers: dict[str, Callable[[], None]] = {
        "rank 0 to rank 1": lambda: _send(rank, ours, theirs),
        "both ways at once": lambda: _exchange(rank, ours, theirs),
        "rank 0 to rank 1, verified": lambda: _send_verified(rank, ours, theirs, take),
    }
    for what, transfer in transfers.items():
        rank.meet()
        seconds = rank.gather(rank.seconds(transfer))[1]
        rows.append(
            {"what": what, "gb": round(len(ours) / _GB, 2), "gbps": round(len(ours) / _GB / seconds, 1)}
        )
    return rows


def _fingerprint_cost(rank: Rank, ours: Tensor) -> dict[str, Any]:
    take = fingerprinter([ours], rank.device)
    seconds = rank.seconds(take)
    return {"what": "fingerprint", "ms_per_gb": round(1e3 * seconds / (len(ours) / _GB), 3)}


def _send(rank: Rank, ours: Tensor, theirs: Tensor) -> None:
    if rank.number == 0:
        dist.send(ours, 1)
    elif rank.number == 1:
        dist.recv(theirs, 0)


def _exchange(rank: Rank, ours: Tensor, theirs: Tensor) -> None:
    if rank.number > 1:
        return
    peer = 1 - rank.number
    requests = dist.batch_isend_irecv(
        [dist.P2POp(dist.isend, ours, peer), dist.P2POp(dist.irecv, theirs, peer)]
    )
    for request in requests:
        request.wait()


def _send_verified(rank: Rank, ours: Tensor, theirs: Tensor, take: Fingerprinter) -> None:
    """Send buffer and fingerprint; the receiver compares it with that of what arrived."""
    _send(rank, ours, theirs)
    if rank.number == 0:
        dist.send(take(), 1)
    elif rank.number == 1:
        wanted = torch.empty(1, dtype=torch.int64, device=rank.device)
        dist.recv(wanted, 0)
        found = take()
        if not torch.equal(found, wanted):
            raise RuntimeError(f"the fingerprint is {int(found)}, sent was {int(wanted)}")
