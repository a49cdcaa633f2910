"""Sum of next-token cross-entropy without ever holding all logits.

16k tokens x 128k words are 12.6 GB of logits and gradients at once; chunks of 2048 tokens need 1.6 GB.
torch's own `F.linear_cross_entropy` returns the loss in bf16 (errors up to 1.5e-2), so it is not used.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as F
from torch import Tensor


def cross_entropy_sum(hidden: Tensor, weight: Tensor, labels: Tensor, *, chunk_tokens: int) -> Tensor:
    """Return the summed cross-entropy of `hidden @ weight.T` against `labels`, in fp32.

    Args:
        hidden: [tokens, width]
        weight: [vocabulary, width]
        labels: [tokens]
        chunk_tokens: Tokens whose logits exist at one time.
    """
    if labels.numel() <= chunk_tokens:
        return F.cross_entropy(F.linear(hidden, weight).float(), labels, reduction="sum")
    loss: Tensor = _ChunkedCrossEntropy.apply(hidden, weight, labels, chunk_tokens)  # type: ignore[no-untyped-call]
    return loss


class _ChunkedCrossEntropy(torch.autograd.Function):
    """Computes each chunk's gradient together with its loss, so that its logits can go at once."""

    @staticmethod
    def forward(ctx: Any, hidden: Tensor, weight: Tensor, labels: Tensor, chunk_tokens: int) -> Tensor:
        need_gradient = any(ctx.needs_input_grad[:2])
        hidden_gradient = torch.empty_like(hidden) if need_gradient else None
        weight_gradient = (
            torch.zeros(weight.shape, dtype=torch.float32, device=weight.device) if need_gradient else None
        )
        total = torch.zeros((), dtype=torch.float32, device=hidden.device)
        for start in range(0, labels.numel(), chunk_tokens):
            part = slice(start, start + chunk_tokens)
            loss, logits_gradient = _chunk(hidden[part], weight, labels[part])
            total += loss
            if hidden_gradient is not None and weight_gradient is not None:
                torch.mm(logits_gradient, weight, out=hidden_gradient[part])
                weight_gradient += logits_gradient.t() @ hidden[part]
        if hidden_gradient is not None and weight_gradient is not None:
            ctx.save_for_backward(hidden_gradient, weight_gradient.to(weight.dtype))
        return total

    @staticmethod
    def backward(ctx: Any, *gradients: Tensor) -> tuple[Tensor, Tensor, None, None]:
        hidden_gradient, weight_gradient = ctx.saved_tensors
        scale = gradients[0]
        return hidden_gradient * scale, weight_gradient * scale, None, None


def _chunk(hidden: Tensor, weight: Tensor, labels: Tensor) -> tuple[Tensor, Tensor]:
    logits = F.linear(hidden, weight).float()
    normalizer = torch.logsumexp(logits, dim=-1, keepdim=True)
    loss = (normalizer - logits.gather(1, labels[:, None])).sum()
    gradient = torch.exp(logits - normalizer)
    gradient.scatter_add_(1, labels[:, None], torch.full_like(labels[:, None], -1, dtype=torch.float32))
    return loss, gradient.to(hidden.dtype)
