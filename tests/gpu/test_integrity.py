"""The kernel's fingerprints are the ones that the CPU computes."""

from __future__ import annotations

import pytest
import torch

from training.integrity import fingerprint, fingerprinter

pytestmark = pytest.mark.gpu


def test_kernel_equals_the_definition() -> None:
    generator = torch.Generator().manual_seed(0)
    shapes = [(1,), (1023,), (1024, 33), (70_001,), (0,)]
    tensors = [torch.randn(shape, generator=generator) for shape in shapes]
    on_device = [tensor.cuda() for tensor in tensors]
    found = fingerprinter(on_device, torch.device("cuda"))().tolist()
    assert found == [fingerprint(tensor) for tensor in tensors]
    on_device[2][5, 5] += 1
    assert fingerprinter(on_device, torch.device("cuda"))().tolist() != found
