"""Fingerprints of tensors, taken where they lie: on the GPU before the copy, again after a restore.

    fingerprint = sum over i of word[i] * weight(i)  mod 2^64
    weight(i) = t ^ (t >> 15),  t = (i + 1) * 0x9E3779B1 mod 2^32

Words are unsigned 32 bit. All weights differ and none is 0, and a product of two 32-bit numbers does not
wrap in 64 bits, so any one changed word and any two exchanged words are seen for certain, other damage with
a chance of 2^-64 to miss it.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import numpy as np
import torch
from torch import Tensor

_GOLDEN = 0x9E3779B1
_BLOCK_WORDS = 1 << 20

Fingerprinter = Callable[[], Tensor]


def fingerprinter(tensors: Sequence[Tensor], device: torch.device) -> Fingerprinter:
    """Return a function that takes the fingerprints of all tensors as they are then, int64, on the device.

    On a GPU it is one kernel over all of them, queued on the current stream.

    Args:
        tensors: Contiguous tensors, whose storage stays where it is.
        device: Where they are.
    """
    if device.type == "cuda":
        from training.integrity_kernel import FusedFingerprints

        return FusedFingerprints(tensors, device)
    return lambda: torch.tensor([fingerprint(tensor) for tensor in tensors], dtype=torch.int64)


def fingerprint(tensor: Tensor) -> int:
    """Return the fingerprint of a contiguous CPU tensor, as a signed 64-bit number."""
    words = _words(tensor)
    total = 0
    for start in range(0, len(words), _BLOCK_WORDS):
        block = words[start : start + _BLOCK_WORDS]
        indices = np.arange(start + 1, start + 1 + len(block), dtype=np.uint32)
        weights = indices * np.uint32(_GOLDEN)
        weights ^= weights >> np.uint32(15)
        total += int(np.multiply(block, weights, dtype=np.uint64).sum(dtype=np.uint64))
    total &= (1 << 64) - 1
    return total - (1 << 64) if total >> 63 else total


def _words(tensor: Tensor) -> np.ndarray[tuple[int], np.dtype[np.uint32]]:
    raw = tensor.detach().reshape(-1).view(torch.uint8).numpy()
    if raw.nbytes % 4:
        raw = np.concatenate([raw, np.zeros(-raw.nbytes % 4, dtype=np.uint8)])
    return raw.view(np.uint32)
