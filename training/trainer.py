"""The training loop, the only one, for every recovery mode.

    step k:  forward + backward (micro-batches) -> clip -> [wait for the last snapshot, on the GPU]
             -> optimizer -> save if due -> read the metrics of step k-1

Nothing in a step waits for the device: losses and norms are copied to pinned memory and read a step late.
A host sync between the optimizer step and the end of a snapshot would double the step.
"""

from __future__ import annotations

import hashlib
import logging
import math
import os
import time
from collections.abc import Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from training import model as models
from training import weights
from training.checkpoint import Checkpointer
from training.config import JobConfig, OptimizerConfig
from training.data import Batch, BatchReader, ValidationReader
from training.errors import RunError
from training.events import EventLog
from training.faults import FaultPlan
from training.layout import Place, place_in
from training.ledger import SampleLedger
from training.restart import Attempt, RankMonitor
from training.shards import TokenStore
from training.state import make_state
from training.throughput import Throughput, flops_per_token, peak_flops

logger = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class StepMetrics:
    """What a step leaves on the device; read a step later."""

    step: int
    notes: Tensor
    """On the device: [summed loss of all ranks, gradient norm], fp64."""
    values: Tensor
    """Pinned host memory: the same two and the checkpointer's signals, fp64."""
    ready: torch.cuda.Event | None


class Trainer:
    """Model, optimizer, data and loop of one attempt. Nothing of it outlives a fault."""

    def __init__(
        self,
        config: JobConfig,
        *,
        device: torch.device,
        mesh: DeviceMesh,
        training_store: TokenStore,
        validation_store: TokenStore | None,
        checkpointer: Checkpointer,
        events: EventLog,
        monitor: RankMonitor,
        faults: FaultPlan,
    ) -> None:
        """Build the model on the device and restore the newest state."""
        self.config, self.device = config, device
        self._events, self._monitor, self._faults = events, monitor, faults
        self._checkpointer = checkpointer
        self._rank, self._world_size = dist.get_rank(), dist.get_world_size()
        with events.span("build"):
            self._model_config = models.load_model_config(config.model)
            self._task = self._build_task(mesh)
            self.state = make_state(self._task.model, config.optimizer, device=device)
        with events.span("load"):
            self._restore_or_initialize(place_in(mesh))
        self._ledger = SampleLedger(checkpointer.run_dir, lineage=checkpointer.lineage, rank=self._rank)
        self._batches = self._open_batches(training_store)
        self._validation = self._open_validation(validation_store)
        self._throughput = self._make_throughput()
        self._unread: StepMetrics | None = None

    def train(self, attempt: Attempt) -> None:
        """Run to the last step; return when it is durable."""
        with models.no_packed_sequence_check():
            while self.state.step < self.config.training.steps:
                self.run_step()
                attempt.ping()
                if self._evaluation_is_due():
                    self._evaluate(attempt)
            self._read_metrics(self._unread)
        if not self._checkpointer.has_begun(self.state.step):
            # killed after the last step and before its checkpoint: the state came back from memory alone
            self._save(last=True)
        with (
            attempt.unwatched(),
            self._monitor.section("checkpoint"),
            self._events.span("finalize"),
        ):
            self._checkpointer.finalize_last()

    def run_step(self) -> None:
        """Do one optimizer step, and start a save if it is due."""
        with self._monitor.section("step"):
            self._step()
        if self._save(last=self.state.step == self.config.training.steps):
            self._faults.in_step("save", step=self.state.step)

    def close(self) -> None:
        self._batches.close()
        self._ledger.close()
        if self._validation is not None:
            self._validation.close()

    def _build_task(self, mesh: DeviceMesh) -> models.LanguageModelTask:
        config = self.config
        task = models.LanguageModelTask(
            models.build_model(self._model_config), loss_chunk_tokens=config.model.loss_chunk_tokens
        )
        models.shard(task, mesh, config.model, bf16=uses_bf16(config, self.device))
        task.to_empty(device=self.device)
        if hasattr(task.model, "tie_weights"):
            task.model.tie_weights()
        task.train()
        return task

    def _restore_or_initialize(self, place: Place) -> None:
        seed = self.config.training.seed
        weights.initialize(self._task.model, seed=seed, device=self.device, buffers_only=True)
        restored = self._checkpointer.restore(
            self.state, place, meanwhile=lambda: self._faults.in_setup("restore")
        )
        if restored.source is not None:
            if self._rank == 0:
                logger.info("resumed at step %d from %s", restored.step, restored.source)
            if restored.notes:
                # a fault mostly comes before the metrics of the last step were read
                self._emit_metrics(restored.step, *restored.notes)
            return
        if self.config.model.weights == "pretrained":
            weights.load_pretrained(self._task.model, self.config.model.source)
        else:
            weights.initialize(self._task.model, seed=seed, device=self.device)

    def _step(self) -> None:
        start, step = time.time(), self.state.step + 1
        batch = self._batches.at(self.state.position)
        torch.manual_seed(_step_seed(self.config.training.seed, step, self._rank))
        loss = self._forward_backward(batch, step)
        norm = self._clip()
        self._faults.in_step("before_optimizer", step=step)
        for group in self.state.optimizer.param_groups:
            group["lr"] = self._learning_rate_at(step)
        self._checkpointer.before_optimizer_step()
        self.state.optimizer.step()
        self.state.optimizer.zero_grad()
        self.state.step = step
        self.state.position += self.config.data.global_batch_samples
        self._ledger.append(step, batch)
        metrics = self._queue_metrics(step, loss, norm)
        self._checkpointer.after_optimizer_step(self.state, metrics.notes)
        self._faults.in_step("after_optimizer", step=step)
        # on a CPU there is nothing to wait for
        is_late = self.device.type == "cuda"
        previous, self._unread = (self._unread, metrics) if is_late else (metrics, None)
        self._read_metrics(previous)
        seconds, tokens = time.time() - start, self._tokens_per_step()
        self._events.emit("step", step=step, start=start, seconds=seconds, tokens=tokens)

    def _forward_backward(self, batch: Batch, step: int) -> Tensor:
        """Return the summed loss of this rank's samples; gradients end as the mean over all tokens."""
        total = torch.zeros((), dtype=torch.float64, device=self.device)
        # FSDP averages gradients over the ranks: undo that, so that the sum over tokens is divided once
        scale = self._world_size / self._tokens_per_step()
        for index, micro_batch in enumerate(batch.tokens):
            tokens = micro_batch.to(self.device, non_blocking=True)
            self._task.set_requires_gradient_sync(index == len(batch.tokens) - 1)  # type: ignore[operator]
            loss = self._faults.in_forward(self._task(tokens), step=step)
            (loss * scale).backward()
            total += loss.detach().double()
        self._faults.in_step("backward", step=step)
        return total

    def _clip(self) -> Tensor:
        maximum = self.config.optimizer.maximum_gradient_norm or math.inf
        norm = torch.nn.utils.clip_grad_norm_(self.state.parameters.values(), maximum)
        return norm.full_tensor() if isinstance(norm, DTensor) else norm

    def _queue_metrics(self, step: int, loss: Tensor, norm: Tensor) -> StepMetrics:
        summed = torch.cat([loss.view(1), self._to_device(self._checkpointer.signals())])
        dist.all_reduce(summed)
        notes = torch.stack([summed[0], norm.double()])
        on_device = torch.cat([notes, summed[1:]])
        if self.device.type != "cuda":
            return StepMetrics(step=step, notes=notes, values=on_device, ready=None)
        values = torch.empty(len(on_device), dtype=torch.float64, pin_memory=True)
        values.copy_(on_device, non_blocking=True)
        ready = torch.cuda.current_stream().record_event()
        return StepMetrics(step=step, notes=notes, values=values, ready=ready)

    def _to_device(self, values: Sequence[float]) -> Tensor:
        """Copy numbers to the device without waiting for it."""
        on_host = torch.tensor(values, dtype=torch.float64, pin_memory=self.device.type == "cuda")
        return on_host.to(self.device, non_blocking=True)

    def _read_metrics(self, metrics: StepMetrics | None) -> None:
        if metrics is None:
            return
        if metrics.ready is not None:
            metrics.ready.synchronize()
        loss_sum, norm, *signals = metrics.values.tolist()
        self._checkpointer.learn(metrics.step, signals)
        self._emit_metrics(metrics.step, loss_sum, norm)
        last = metrics.step == self.config.training.steps
        if self._rank == 0 and (last or metrics.step % self.config.training.log_every_steps == 0):
            self._log(metrics.step, loss_sum / self._tokens_per_step(), norm)

    def _emit_metrics(self, step: int, loss_sum: float, norm: float) -> None:
        self._events.emit(
            "metrics",
            step=step,
            loss=loss_sum / self._tokens_per_step(),
            gradient_norm=norm,
            learning_rate=self._learning_rate_at(step),
        )

    def _learning_rate_at(self, step: int) -> float:
        return learning_rate_at(step, self.config.optimizer, self.config.training.steps)

    def _log(self, step: int, loss: float, norm: float) -> None:
        logger.info(
            "step %d/%d  loss %.4f  grad %.3f  lr %.2e  %s",
            step,
            self.config.training.steps,
            loss,
            norm,
            self._learning_rate_at(step),
            self._throughput.report(step),
        )

    def _save(self, *, last: bool) -> bool:
        """Start a save if one is due; return whether one has begun."""
        start = time.time()
        with self._monitor.section("checkpoint"):
            saved = self._checkpointer.maybe_save(self.state, last=last)
        if saved:
            self._events.span_since("save", start, step=self.state.step)
        return saved

    def _evaluation_is_due(self) -> bool:
        every = self.config.training.evaluate_every_steps
        return bool(every and self._validation is not None and self.state.step % every == 0)

    @torch.no_grad()
    def _evaluate(self, attempt: Attempt) -> None:
        assert self._validation is not None
        with self._events.span("evaluate", step=self.state.step), self._monitor.section("step"):
            self._task.eval()
            totals = torch.zeros(2, dtype=torch.float64, device=self.device)
            for batch in self._validation:
                for micro_batch in batch.tokens:
                    totals[0] += self._task(micro_batch.to(self.device, non_blocking=True))
                    totals[1] += micro_batch[:, 1:].numel()
                attempt.ping()
            dist.all_reduce(totals)
            models.reshard(self._task)
            self._task.train()
            loss_sum, tokens = totals.tolist()
        self._events.emit("evaluation", step=self.state.step, loss=loss_sum / tokens)
        if self._rank == 0:
            logger.info("step %d  validation loss %.4f", self.state.step, loss_sum / tokens)

    def _open_batches(self, store: TokenStore) -> BatchReader:
        vocabulary = self._model_config.vocab_size
        if store.vocabulary_tokens > vocabulary:
            raise RunError(
                f"data.path={self.config.data.path!r}: its tokenizer has {store.vocabulary_tokens} tokens, "
                f"the model only {vocabulary}; prepare the data with the model's own tokenizer"
            )
        return BatchReader(
            store,
            sequence_length_tokens=self.config.data.sequence_length_tokens,
            global_batch_samples=self.config.data.global_batch_samples,
            seed=self.config.training.seed,
            rank=self._rank,
            world_size=self._world_size,
            accumulation_steps=self.config.training.gradient_accumulation_steps,
            prefetch_batches=self.config.data.prefetch_batches,
            lookback_batches=self.config.data.lookback_batches,
            pin_memory=self.device.type == "cuda",
        )

    def _open_validation(self, store: TokenStore | None) -> ValidationReader | None:
        if store is None:
            return None
        return ValidationReader(
            store,
            sequence_length_tokens=self.config.data.sequence_length_tokens,
            global_batch_samples=self.config.data.global_batch_samples,
            batches=self.config.training.evaluation_batches,
            rank=self._rank,
            world_size=self._world_size,
            prefetch_batches=self.config.data.validation_prefetch_batches,
            pin_memory=self.device.type == "cuda",
        )

    def _make_throughput(self) -> Throughput:
        _, counted = models.parameter_counts(self._task)
        peak = peak_flops(self.device)
        return Throughput(
            tokens_per_step=self._tokens_per_step(),
            total_steps=self.config.training.steps,
            flops_per_token=flops_per_token(
                self._model_config, counted, self.config.data.sequence_length_tokens
            ),
            peak_flops=peak * self._world_size if peak else None,
        )

    def _tokens_per_step(self) -> int:
        return self.config.data.global_batch_samples * self.config.data.sequence_length_tokens


def learning_rate_at(step: int, config: OptimizerConfig, total_steps: int) -> float:
    """Return the learning rate of a step (the first is 1): linear warm-up, then cosine decay."""
    if step <= config.warmup_steps:
        return config.learning_rate * step / config.warmup_steps
    progress = (step - config.warmup_steps) / max(total_steps - config.warmup_steps, 1)
    cosine = 0.5 * (1 + math.cos(math.pi * min(progress, 1.0)))
    floor = config.final_learning_rate_ratio
    return config.learning_rate * (floor + (1 - floor) * cosine)


def uses_bf16(config: JobConfig, device: torch.device) -> bool:
    """Tell whether forward and backward run in bf16; weights are fp32 in any case."""
    precision = config.training.precision
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")


def set_determinism(config: JobConfig) -> None:
    """Fix what makes arithmetic depend on the machine's load: threads, and kernels where asked."""
    torch.set_num_threads(config.training.threads_per_rank)
    if config.training.deterministic:
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.use_deterministic_algorithms(True)


def _step_seed(seed: int, step: int, rank: int) -> int:
    digest = hashlib.blake2b(f"{seed}/{step}/{rank}".encode(), digest_size=8).digest()
    return int.from_bytes(digest, "big") >> 1
