"""Where each tensor of a rank's shard lies in a snapshot slot, and the hash that tells layouts apart."""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass

import torch
import xxhash
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

_ALIGNMENT_BYTES = 512
_PAGE_BYTES = 4096
# Marks and descriptor; the fingerprints follow
HEADER_BYTES = 4096


@dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Which part of the state a rank holds; says nothing about host or rank."""

    shard: int
    shards: int
    replica: int = 0
    """Copy number of the shard (HSDP); all copies hold the same bits."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One tensor in the slot."""

    name: str
    offset: int
    shape: tuple[int, ...]
    dtype: torch.dtype

    @property
    def size_bytes(self) -> int:
        return torch.Size(self.shape).numel() * self.dtype.itemsize


@dataclass(frozen=True, kw_only=True, slots=True)
class Layout:
    """Places of all tensors of a shard, and the slot's size."""

    place: Place
    pieces: tuple[Piece, ...]
    size_bytes: int
    digest: str
    """Equal for slots that the same rank of the same model on the same mesh can load."""

    @property
    def fingerprints_bytes(self) -> int:
        return 8 * len(self.pieces)


def place_in(mesh: DeviceMesh) -> Place:
    """Return the place of this rank in a mesh of the dimensions (shard) or (replicate, shard)."""
    coordinate = mesh.get_coordinate()
    assert coordinate is not None
    replica = coordinate[0] if mesh.ndim > 1 else 0
    return Place(shard=coordinate[-1], shards=mesh.size(mesh.ndim - 1), replica=replica)


def local_tensors(tensors: Mapping[str, Tensor]) -> dict[str, Tensor]:
    """Return this rank's shards, as plain tensors that share the storage."""
    return {
        name: tensor.to_local() if isinstance(tensor, DTensor) else tensor for name, tensor in tensors.items()
    }


def make_layout(local: Mapping[str, Tensor], place: Place) -> Layout:
    """Lay out a rank's shards one after the other, aligned."""
    pieces: list[Piece] = []
    offset = HEADER_BYTES + _up(8 * len(local), _PAGE_BYTES)
    for name, tensor in sorted(local.items()):
        pieces.append(Piece(name=name, offset=offset, shape=tuple(tensor.shape), dtype=tensor.dtype))
        offset += _up(tensor.nbytes, _ALIGNMENT_BYTES)
    return Layout(
        place=place,
        pieces=tuple(pieces),
        size_bytes=_up(offset, _PAGE_BYTES),
        digest=_digest(pieces, place),
    )


def _digest(pieces: list[Piece], place: Place) -> str:
    rows = [[piece.name, piece.offset, piece.shape, str(piece.dtype)] for piece in pieces]
    described = json.dumps([place.shard, place.shards, rows], separators=(",", ":"))
    return xxhash.xxh3_128_hexdigest(described.encode())


def _up(size: int, unit: int) -> int:
    return -(-size // unit) * unit
