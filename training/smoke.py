"""Prove a node's mount and its network: `torchrun -m training.smoke DIRECTORY MIB`.

`python -m k8s doctor --smoke` runs it in the pods of a recipe. The last line of rank 0 is one JSON object;
with NCCL_DEBUG=INFO the log above it names the network that NCCL took.
"""

from __future__ import annotations

import importlib.metadata
import json
import os
import platform
import sys
import time
from pathlib import Path

import torch
import torch.distributed as dist

MARK = "holdfast-smoke"
_WARM_UP, _ROUNDS = 5, 20


def main(directory: Path, size_mib: int) -> None:
    """Measure and report.

    Args:
        directory: Folder of the shared file system.
        size_mib: Size of the reduced buffer.
    """
    cuda = torch.cuda.is_available()
    device = torch.device("cuda", int(os.environ["LOCAL_RANK"])) if cuda else torch.device("cpu")
    if cuda:
        torch.cuda.set_device(device)
    dist.init_process_group("nccl" if cuda else "gloo", device_id=device if cuda else None)
    if os.environ["LOCAL_RANK"] == "0":
        prove_mount(directory)
    gigabytes_per_second = bus_bandwidth(device, size_mib)
    if dist.get_rank() == 0:
        print(json.dumps({MARK: report(gigabytes_per_second, cuda=cuda)}), flush=True)  # noqa: T201
    dist.destroy_process_group()


def prove_mount(directory: Path) -> None:
    """Write, read back and remove a file of this node."""
    directory.mkdir(parents=True, exist_ok=True)
    path = directory / f"smoke-{platform.node()}"
    path.write_bytes(os.urandom(1 << 20))
    written = path.read_bytes()
    path.unlink()
    if len(written) != 1 << 20:
        sys.exit(f"{directory}: wrote {1 << 20} bytes, read {len(written)}")


def bus_bandwidth(device: torch.device, size_mib: int) -> float:
    """Return the bus bandwidth of an all-reduce in GB/s, as nccl-tests count it."""
    buffer = torch.ones(size_mib << 18, dtype=torch.float32, device=device)
    for _ in range(_WARM_UP):
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX)
    _finish(device)
    start = time.perf_counter()
    for _ in range(_ROUNDS):
        dist.all_reduce(buffer, op=dist.ReduceOp.MAX)
    _finish(device)
    seconds = (time.perf_counter() - start) / _ROUNDS
    world = dist.get_world_size()
    return 2 * (world - 1) / world * buffer.nbytes / seconds / 1e9


def report(gigabytes_per_second: float, *, cuda: bool) -> dict[str, object]:
    """Return the measurement and the versions that it was made with."""
    nccl = torch.cuda.nccl.version() if cuda else ()
    return {
        "ranks": dist.get_world_size(),
        "bus_gigabytes_per_second": gigabytes_per_second,
        "torch": torch.__version__,
        "nccl": ".".join(map(str, nccl)),
        "nvrx": _version("nvidia-resiliency-ext"),
        "glibc": platform.libc_ver()[1],
    }


def _finish(device: torch.device) -> None:
    if device.type == "cuda":
        torch.cuda.synchronize(device)
    dist.barrier()


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return ""


if __name__ == "__main__":
    main(Path(sys.argv[1]), int(sys.argv[2]))
