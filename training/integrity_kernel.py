"""The fingerprints of `training.integrity` as one Triton kernel over a table of tensors."""

from __future__ import annotations

from collections.abc import Sequence

import torch
import triton
import triton.language as tl
from torch import Tensor

_BLOCK_WORDS = 1024
_ROUNDS = 32
_WORD_BYTES = 4


class FusedFingerprints:
    """Takes the fingerprints of many tensors in two launches, whatever their number."""

    def __init__(self, tensors: Sequence[Tensor], device: torch.device) -> None:
        if any(tensor.nbytes % _WORD_BYTES or not tensor.is_contiguous() for tensor in tensors):
            raise ValueError("fingerprints need contiguous tensors of whole 4-byte words")
        rows = [[tensor.data_ptr(), tensor.nbytes // _WORD_BYTES] for tensor in tensors]
        span = _BLOCK_WORDS * _ROUNDS
        programs = [
            [index, start] for index, (_, words) in enumerate(rows) for start in range(0, words, span)
        ]
        self._tensors = tuple(tensors)
        self._rows = torch.tensor(rows, dtype=torch.int64, device=device)
        self._programs = torch.tensor(programs, dtype=torch.int64, device=device)

    def __call__(self) -> Tensor:
        sums = torch.zeros(len(self._tensors), dtype=torch.int64, device=self._rows.device)
        if len(self._programs):
            grid = (len(self._programs),)
            _weighted_sums[grid](self._rows, self._programs, sums, block_words=_BLOCK_WORDS, rounds=_ROUNDS)
        return sums


# Triton compiles the source text: an annotation with a name that it does not know stops it
@triton.jit  # type: ignore[untyped-decorator]
def _weighted_sums(rows, programs, sums, block_words: tl.constexpr, rounds: tl.constexpr):  # type: ignore[no-untyped-def]
    program = tl.program_id(0)
    index = tl.load(programs + 2 * program)
    start = tl.load(programs + 2 * program + 1)
    data = tl.load(rows + 2 * index).to(tl.pointer_type(tl.uint32))
    words = tl.load(rows + 2 * index + 1)
    total = tl.zeros((block_words,), tl.uint64)
    for number in range(rounds):
        offsets = start + number * block_words + tl.arange(0, block_words)
        values = tl.load(data + offsets, mask=offsets < words, other=0)
        weights = (offsets + 1).to(tl.uint32) * 0x9E3779B1
        weights ^= weights >> 15
        total += values.to(tl.uint64) * weights.to(tl.uint64)
    tl.atomic_add(sums + index, tl.sum(total, axis=0).to(tl.int64))
