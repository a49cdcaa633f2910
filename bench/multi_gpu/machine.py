"""What the benchmark runs on."""

from __future__ import annotations

import os
import platform
import shutil
import subprocess
from collections.abc import Sequence
from functools import cache
from pathlib import Path
from typing import Any

_NODES = Path("/sys/devices/system/node")


@cache
def gpu_count() -> int:
    """Return the number of GPUs, without making a CUDA context."""
    return len(_query("index"))


@cache
def gpu_name() -> str:
    """Return what the first GPU is called."""
    return next(iter(_query("name")), "")


def gpu_memory_gib() -> list[float]:
    """Return the memory in use on every GPU."""
    return [float(value) / 1024 for value in _query("memory.used")]


def describe() -> dict[str, Any]:
    """Return machine and software in a few words."""
    import torch

    return {
        "gpus": gpu_count(),
        "gpu": gpu_name() or "none",
        "driver": next(iter(_query("driver_version")), ""),
        "cores": os.cpu_count(),
        "numa_nodes": len(numa_nodes()),
        "kernel": platform.release(),
        "python": platform.python_version(),
        "torch": torch.__version__,
        "nccl": ".".join(map(str, torch.cuda.nccl.version())) if gpu_count() else "",
    }


def numa_nodes() -> dict[int, list[int]]:
    """Return the CPUs of every NUMA node."""
    found = {}
    for path in sorted(_NODES.glob("node[0-9]*")):
        found[int(path.name.removeprefix("node"))] = _cpus((path / "cpulist").read_text().strip())
    return found


def gpu_numa_node(pci_bus_id: str) -> int:
    """Return the NUMA node of a PCI device, -1 where the machine does not say."""
    path = Path("/sys/bus/pci/devices") / pci_bus_id.lower()[-12:] / "numa_node"
    return int(path.read_text()) if path.exists() else -1


def _cpus(text: str) -> list[int]:
    found: list[int] = []
    for part in filter(None, text.split(",")):
        first, _, last = part.partition("-")
        found.extend(range(int(first), int(last or first) + 1))
    return found


def _query(field: str) -> Sequence[str]:
    if shutil.which("nvidia-smi") is None:
        return ()
    command = ["nvidia-smi", f"--query-gpu={field}", "--format=csv,noheader,nounits"]
    done = subprocess.run(command, capture_output=True, text=True, check=False)
    return done.stdout.splitlines() if done.returncode == 0 else ()
