"""What a step computed: all-reduced on the device before its update, read on the host a step late.

On a GPU the copy to the host is queued, and read when the next step has been queued too, so nothing waits.
Whatever the host decides by these numbers therefore comes one step late on a GPU; on a CPU there is nothing
to wait for, and they are read at once. What must not come late is decided on the device (`is_finite`).
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

import torch
import torch.distributed as dist
from torch import Tensor

from training.data import Batch


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """The numbers of one step, still on the device."""

    step: int
    batch: Batch
    notes: Tensor
    """[summed loss of all ranks, gradient norm, updates that were left out], fp64. They are kept with the
    state: the host learns of a bad step late, and a fault may come first."""
    is_finite: Tensor
    """Whether loss and norm are; the same on all ranks."""
    values: Tensor
    """Summed loss, norm, this rank's own loss, the summed signals; pinned host memory once queued."""
    ready: torch.cuda.Event | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Reading:
    """The numbers of one step, on the host."""

    step: int
    batch: Batch
    loss_sum: float
    gradient_norm: float
    own_loss_sum: float
    """This rank's part of the loss."""
    signals: tuple[float, ...]
    """Sums of what the ranks had to tell each other."""


class MetricsQueue:
    """Metrics on their way to the host, from one restore to the next."""

    def __init__(self, device: torch.device, *, counts_left_out: bool) -> None:
        """Begin.

        Args:
            device: Where the losses are.
            counts_left_out: Whether an update that is left out has to be made up for.
        """
        self._device, self._counts_left_out = device, counts_left_out
        self._left_out = torch.zeros(1, dtype=torch.float64, device=device)
        self._unread: StepMetrics | None = None

    def reduce(
        self, step: int, batch: Batch, *, loss: Tensor, norm: Tensor, signals: Sequence[float]
    ) -> StepMetrics:
        """Sum loss and signals over the ranks; a collective, and no wait.

        Args:
            step: The step, which is not applied yet.
            batch: What went into it.
            loss: Summed loss of this rank's samples, fp64.
            norm: Gradient norm, the same on all ranks.
            signals: What this rank has to tell the others.
        """
        own = loss.view(1)
        summed = torch.cat([own, self._to_device(signals)])
        dist.all_reduce(summed)
        numbers = torch.stack([summed[0], norm.double()])
        is_finite = numbers.isfinite().all()
        if self._counts_left_out:
            self._left_out += ~is_finite
        return StepMetrics(
            step=step,
            batch=batch,
            notes=torch.cat([numbers, self._left_out]),
            is_finite=is_finite,
            values=torch.cat([numbers, own, summed[1:]]),
        )

    def push(self, metrics: StepMetrics) -> Reading | None:
        """Send a step's metrics to the host; return those that can be read without a wait."""
        if self._device.type != "cuda":
            return _read(metrics)
        previous, self._unread = self._unread, _on_their_way(metrics)
        return _read(previous) if previous else None

    def drain(self) -> Reading | None:
        """Wait for the metrics that are on their way."""
        previous, self._unread = self._unread, None
        return _read(previous) if previous else None

    def _to_device(self, values: Sequence[float]) -> Tensor:
        """Copy numbers to the device without waiting for it."""
        on_host = torch.tensor(values, dtype=torch.float64, pin_memory=self._device.type == "cuda")
        return on_host.to(self._device, non_blocking=True)


def _on_their_way(metrics: StepMetrics) -> StepMetrics:
    values = torch.empty(len(metrics.values), dtype=torch.float64, pin_memory=True)
    values.copy_(metrics.values, non_blocking=True)
    return replace(metrics, values=values, ready=torch.cuda.current_stream().record_event())


def _read(metrics: StepMetrics) -> Reading:
    if metrics.ready is not None:
        metrics.ready.synchronize()
    loss_sum, norm, own, *signals = metrics.values.tolist()
    return Reading(
        step=metrics.step,
        batch=metrics.batch,
        loss_sum=loss_sum,
        gradient_norm=norm,
        own_loss_sum=own,
        signals=tuple(signals),
    )
