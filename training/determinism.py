"""What makes a step give the same bits again: threads, kernels, random numbers."""

from __future__ import annotations

import hashlib
import os

import torch

from training.config import JobConfig


def set_determinism(config: JobConfig) -> None:
    """Fix what makes arithmetic depend on the machine's load: threads, and kernels where asked."""
    torch.set_num_threads(config.training.threads_per_rank)
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def step_seed(seed: int, step: int, rank: int) -> int:
    """Return the seed of a rank's random numbers in a step: a restart needs no generator's state."""
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
