"""sha256 over the full tensors of a checkpoint, whatever number of ranks wrote it.

A process of its own, without process group: it reads the checkpoint as anybody would, by plain DCP.
"""

from __future__ import annotations

import argparse
import hashlib
import json
import sys
import warnings
from pathlib import Path

import torch
import torch.distributed.checkpoint as dcp
from torch import Tensor
from torch.distributed.checkpoint import FileSystemReader
from torch.distributed.checkpoint.metadata import TensorStorageMetadata

from training import commit
from training.errors import CheckpointError


def load_full(directory: Path, *, prefix: str = "") -> dict[str, Tensor]:
    """Return every tensor of a DCP checkpoint whose key starts with `prefix`, whole, on the CPU.

    Raises:
        CheckpointError: The checkpoint is not whole, or not DCP.
    """
    manifest = commit.verify(directory)
    if manifest.format != "dcp":
        raise CheckpointError(f"{directory}: format={manifest.format!r}: only dcp can be read here")
    entries = FileSystemReader(directory).read_metadata().state_dict_metadata
    tensors = {
        name: torch.empty(entry.size, dtype=entry.properties.dtype)
        for name, entry in entries.items()
        if isinstance(entry, TensorStorageMetadata) and name.startswith(prefix)
    }
    with warnings.catch_warnings():
        # a single process is what is meant here
        warnings.filterwarnings("ignore", message="torch.distributed is disabled")
        dcp.load(dict(tensors), checkpoint_id=directory, no_dist=True)
    return tensors


def fingerprint(tensors: dict[str, Tensor]) -> str:
    """Return one sha256 over names, shapes, types and bytes, in the order of names."""
    digest = hashlib.sha256()
    for name, tensor in sorted(tensors.items()):
        digest.update(f"{name} {tuple(tensor.shape)} {tensor.dtype}\n".encode())
        digest.update(tensor.contiguous().reshape(-1).view(torch.uint8).numpy().data)
    return digest.hexdigest()


def newest_checkpoint(path: Path) -> Path:
    """Return `path` itself if it is a checkpoint, else the newest one of the run directory `path`.

    Raises:
        CheckpointError: There is none.
    """
    if (path / commit.MANIFEST).exists():
        return path
    found = commit.committed_checkpoints(path / "checkpoints")
    if not found:
        raise CheckpointError(
            f"{path}: holds no committed checkpoint; give a checkpoint or a run directory that has one"
        )
    return found[0]


def main(argv: list[str]) -> int:
    parser = argparse.ArgumentParser(
        prog="training fingerprint", description="sha256 of a checkpoint's full tensors."
    )
    parser.add_argument("path", type=Path, help="a checkpoint, or a run directory for its newest one")
    arguments = parser.parse_args(argv)
    directory = newest_checkpoint(arguments.path)
    tensors = load_full(directory)
    value = {"checkpoint": str(directory), "step": int(tensors["step"]), "sha256": fingerprint(tensors)}
    json.dump(value, sys.stdout)
    sys.stdout.write("\n")
    return 0
