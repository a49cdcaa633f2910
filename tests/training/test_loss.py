from __future__ import annotations

import pytest
import torch
import torch.nn.functional as F

from training.loss import cross_entropy_sum


def case(dtype: torch.dtype) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    generator = torch.Generator().manual_seed(0)
    hidden = torch.randn(33, 16, generator=generator).to(dtype).requires_grad_()
    weight = torch.randn(50, 16, generator=generator).to(dtype).requires_grad_()
    return hidden, weight, torch.randint(0, 50, (33,), generator=generator)


@pytest.mark.parametrize("chunk_tokens", [1, 7, 33, 1000])
def test_equals_the_full_loss_and_its_gradients(chunk_tokens: int) -> None:
    hidden, weight, labels = case(torch.float32)
    loss = cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)
    gradients = torch.autograd.grad(loss * 3, (hidden, weight))
    expected = F.cross_entropy(hidden @ weight.t(), labels, reduction="sum")
    expected_gradients = torch.autograd.grad(expected * 3, (hidden, weight))
    torch.testing.assert_close(loss, expected, rtol=1e-6, atol=0)
    for actual, wanted in zip(gradients, expected_gradients, strict=True):
        torch.testing.assert_close(actual, wanted, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("chunk_tokens", [8, 100])
def test_is_fp32_for_bf16_inputs(chunk_tokens: int) -> None:
    hidden, weight, labels = case(torch.bfloat16)
    loss = cross_entropy_sum(hidden, weight, labels, chunk_tokens=chunk_tokens)
    exact = F.cross_entropy(hidden.float() @ weight.float().t(), labels, reduction="sum")
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(exact.item(), rel=5e-3)


def test_needs_no_gradient_buffers_in_evaluation() -> None:
    hidden, weight, labels = case(torch.float32)
    with torch.no_grad():
        loss = cross_entropy_sum(hidden, weight, labels, chunk_tokens=8)
    assert not loss.requires_grad
