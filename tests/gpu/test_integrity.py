"""The kernel's fingerprints are the ones that the CPU computes."""

from __future__ import annotations

import pytest
import torch

from training.integrity import fingerprint, fingerprinter

pytestmark = pytest.mark.gpu


def test_kernel_equals_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (2,), (1024, 33), (0,), (1023,), (1024,), (32768,), (32769,), (100_001,), (3_000_000,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    tensors.append(torch.arange(1000, dtype=torch.int64))
    on_device = [tensor.cuda() for tensor in tensors]
    take = fingerprinter(on_device, torch.device("cuda"))
    found = take().tolist()
    assert found == [fingerprint(tensor) for tensor in tensors]
    assert take().tolist() == found
    on_device[2][5, 5] += 1
    assert fingerprinter(on_device, torch.device("cuda"))().tolist() != found
