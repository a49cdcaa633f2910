"""One rank of the measurements that need no trainer: `torchrun -m bench.multi_gpu.ranks OUTPUT PARTS`."""

from __future__ import annotations

import argparse
import json
import os
import statistics
import time
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist


@dataclass(frozen=True, kw_only=True, slots=True)
class Rank:
    """This process among the others."""

    number: int
    count: int
    device: torch.device
    state_bytes: int
    """Size of what is copied."""

    @property
    def on_gpu(self) -> bool:
        return self.device.type == "cuda"

    def wait(self) -> None:
        """Wait for this rank's device."""
        if self.on_gpu:
            torch.cuda.synchronize()

    def meet(self) -> None:
        """Wait for all ranks and their devices."""
        self.wait()
        dist.barrier()
        self.wait()

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value."""
        found: list[Any] = [None] * self.count
        dist.all_gather_object(found, value)
        return found

    def seconds(self, work: Callable[[], object], *, repeats: int = 5) -> float:
        """Return the median time of `work` after one warm-up, device included."""
        work()
        self.wait()
        times = []
        for _ in range(repeats):
            start = time.perf_counter()
            work()
            self.wait()
            times.append(time.perf_counter() - start)
        return statistics.median(times)


def open_rank(state_bytes: int) -> Rank:
    """Join the others."""
    local = int(os.environ["LOCAL_RANK"])
    on_gpu = torch.cuda.is_available()
    device = torch.device("cuda", local) if on_gpu else torch.device("cpu")
    if on_gpu:
        torch.cuda.set_device(device)
        dist.init_process_group("cpu:gloo,cuda:nccl", device_id=device)
    else:
        torch.set_num_threads(1)
        dist.init_process_group("gloo")
    return Rank(number=dist.get_rank(), count=dist.get_world_size(), device=device, state_bytes=state_bytes)


def main() -> None:
    from bench.multi_gpu import contention, host_copies, peer_copies

    parts = {
        "host_copies": host_copies.measure,
        "contention": contention.measure,
        "peer_copies": peer_copies.measure,
    }
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("output", type=Path, help="JSON lines are appended to it")
    parser.add_argument("parts", nargs="+", choices=parts)
    parser.add_argument("--state-mb", type=int, default=4096)
    arguments = parser.parse_args()
    rank = open_rank(arguments.state_mb * 1_000_000)
    for name in arguments.parts:
        rows = parts[name](rank)
        rank.meet()
        if rank.number == 0:
            with arguments.output.open("a") as file:
                file.writelines(json.dumps({"section": name, **row}) + "\n" for row in rows)
    dist.destroy_process_group()


if __name__ == "__main__":
    main()
