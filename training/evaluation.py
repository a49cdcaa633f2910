"""Loss on the validation shards; moves no training position."""

from __future__ import annotations

from collections.abc import Callable

import torch
import torch.distributed as dist

from training import model as models
from training.config import JobConfig
from training.data import ValidationReader
from training.shards import TokenStore


class Evaluator:
    """Evaluates where the recipe says so."""

    def __init__(
        self,
        config: JobConfig,
        task: models.LanguageModelTask,
        store: TokenStore | None,
        *,
        device: torch.device,
    ) -> None:
        """Open the validation data; None for a run without evaluation."""
        self._task, self._device = task, device
        self._every_steps = config.training.evaluate_every_steps
        self._batches = _open(config, store, device) if store is not None else None

    def is_due(self, step: int) -> bool:
        return bool(self._every_steps and self._batches is not None and step % self._every_steps == 0)

    @torch.no_grad()
    def loss(self, ping: Callable[[], None]) -> float:
        """Return the mean loss over all ranks' batches.

        Args:
            ping: Called after each batch, to report progress.
        """
        assert self._batches is not None
        self._task.eval()
        totals = torch.zeros(2, dtype=torch.float64, device=self._device)
        for batch in self._batches:
            for micro_batch in batch.tokens:
                totals[0] += self._task(micro_batch.to(self._device, non_blocking=True))
                totals[1] += micro_batch[:, 1:].numel()
            ping()
        dist.all_reduce(totals)
        models.reshard(self._task)
        self._task.train()
        loss_sum, tokens = totals.tolist()
        return float(loss_sum / tokens)

    def close(self) -> None:
        if self._batches is not None:
            self._batches.close()


def _open(config: JobConfig, store: TokenStore, device: torch.device) -> ValidationReader:
    return ValidationReader(
        store,
        sequence_length_tokens=config.data.sequence_length_tokens,
        global_batch_samples=config.data.global_batch_samples,
        batches=config.training.evaluation_batches,
        rank=dist.get_rank(),
        world_size=dist.get_world_size(),
        prefetch_batches=config.data.validation_prefetch_batches,
        pin_memory=device.type == "cuda",
    )
