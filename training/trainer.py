"""The training loop, the only one, for every recovery mode.

    step k:  forward + backward (micro-batches) -> clip -> all-reduce loss and signals
             -> [wait for the last snapshot, on the GPU] -> optimizer, where all is finite
             -> save if due -> read the metrics of step k-1

Nothing in a step waits for the device: losses and norms are copied to pinned memory and read a step late.
A host sync between the optimizer step and the end of a snapshot would double the step.
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Iterator
from contextlib import contextmanager

import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.tensor import DTensor

from training import model as models
from training import weights
from training.checkpoint import Checkpointer
from training.config import JobConfig
from training.data import Batch, BatchReader
from training.determinism import step_seed
from training.errors import RunError
from training.evaluation import Evaluator
from training.events import EventLog
from training.faults import FaultPlan
from training.layout import place_in
from training.ledger import SampleLedger
from training.metrics import MetricsQueue, Reading
from training.non_finite import NonFiniteGuard, NonFiniteLossError, describe, update_if_finite
from training.restart import Attempt, RankMonitor
from training.schedule import learning_rate_at
from training.shards import TokenStore
from training.state import make_state
from training.stop_request import StopRequest, park
from training.throughput import Throughput, flops_per_token, peak_flops

logger = logging.getLogger(__name__)


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
        self._place, self._restores = place_in(mesh), 0
        self._guard = NonFiniteGuard(config.training.non_finite_loss, events=events)
        self._stop = StopRequest()
        with events.span("load"):
            self._restore_or_initialize()
        self._ledger = self._open_ledger()
        self._batches = self._open_batches(training_store)
        self._evaluator = Evaluator(config, self._task, validation_store, device=device)
        self._throughput = self._make_throughput()
        self._batch: Batch | None = None
        self._reported_snapshot = self._checkpointer.snapshot_step

    def train(self, attempt: Attempt) -> bool:
        """Run to the last step, or to the one after which all ranks are told to stop.

        Returns:
            Whether the last step is done and durable.

        Raises:
            NonFiniteLossError: The loss is NaN or infinite, and the recipe says to stop.
        """
        with self._stop.listening(), models.no_packed_sequence_check():
            while not self._is_done(attempt):
                self.run_step()
                self._heed_metrics(attempt)
                attempt.ping()
                if self._stop.is_agreed:
                    self._park(attempt)
                    return False
                if self._evaluator.is_due(self.state.step):
                    self._evaluate(attempt)
        if not self._checkpointer.has_begun(self.state.step):
            # killed after the last step and before its checkpoint: the state came back from memory alone
            self._save(last=True)
        with self._long_wait(attempt), self._events.span("finalize"):
            self._checkpointer.finalize_last()
        return True

    def run_step(self) -> None:
        """Do one optimizer step, and start a save if it is due."""
        with self._monitor.section("step"), self._blamed():
            self._step()
        if self._save(last=self.state.step == self.config.training.steps):
            self._faults.in_step("save", step=self.state.step)

    def close(self) -> None:
        self._batches.close()
        self._ledger.close()
        self._evaluator.close()

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

    def _is_done(self, attempt: Attempt) -> bool:
        """Say whether the last step is done, and was sound."""
        if self.state.step < self.config.training.steps:
            return False
        self._catch_up(attempt)
        return self.state.step == self.config.training.steps

    def _catch_up(self, attempt: Attempt) -> None:
        """Wait for the metrics of the last step, and go back before it if it was not sound."""
        self._read(self._metrics.drain())
        self._heed_metrics(attempt)

    def _heed_metrics(self, attempt: Attempt) -> None:
        """Go back before a step that was not finite, where the recipe says so."""
        bad = self._guard.take_bad()
        if bad is None:
            return
        with self._long_wait(attempt), self._events.span("load"):
            self._metrics.drain()  # of a step that is thrown away
            self._restore_or_initialize(before=bad.step)
        left, self._ledger = self._ledger, self._open_ledger()
        left.close()
        if self.config.training.non_finite_loss == "stop":
            raise NonFiniteLossError(
                f"training.non_finite_loss='stop': rank {self._rank}, {describe(bad)}; "
                f"log: {self._events.path}; a resumed run begins before that step"
            )
        attempt.count_failure("non-finite loss", describe(bad), bad.step)

    def _park(self, attempt: Attempt) -> None:
        self._catch_up(attempt)  # nobody looks at this step again
        with self._events.span("finalize"):
            durable = park(
                self._checkpointer,
                self.state,
                self._stop,
                answer_seconds=self.config.recovery.setup_timeout_seconds,
                waiting=lambda: self._long_wait(attempt),
            )
        self._events.emit("parked", step=self.state.step, durable=durable)
        if self._rank == 0:
            logger.info("told to stop: parked after step %d, durable: %s", self.state.step, durable)

    @contextmanager
    def _long_wait(self, attempt: Attempt) -> Iterator[None]:
        """Lift the limits of a step."""
        with attempt.unwatched(), self._monitor.section("checkpoint"):
            yield

    @contextmanager
    def _blamed(self) -> Iterator[None]:
        """Note on an exception what the step was fed with."""
        try:
            yield
        except Exception as error:
            if self._batch is not None:
                ids = self._batch.sample_ids.tolist()
                error.add_note(f"samples {ids} from position {self._batch.position}")
            raise

    def _open_ledger(self) -> SampleLedger:
        return SampleLedger(self._checkpointer.run_dir, lineage=self._checkpointer.lineage, rank=self._rank)

    def _restore_or_initialize(self, *, before: int | None = None) -> None:
        seed = self.config.training.seed
        counts_left_out = self.config.training.non_finite_loss != "skip"
        self._metrics = MetricsQueue(self.device, counts_left_out=counts_left_out)
        weights.initialize(self._task.model, seed=seed, device=self.device, buffers_only=True)
        restored = self._checkpointer.restore(
            self.state,
            self._place,
            before=before,
            again=self._restores,
            meanwhile=lambda: self._faults.in_setup("restore"),
        )
        self._restores += 1
        if restored.source is not None:
            if self._rank == 0:
                logger.info("resumed at step %d from %s", restored.step, restored.source)
            if restored.notes and all(map(math.isfinite, restored.notes)):
                # a fault mostly comes before the metrics of the last step were read
                self._emit_metrics(restored.step, *restored.notes[:2])
            return
        if self.config.model.weights == "pretrained":
            weights.load_pretrained(self._task.model, self.config.model.source)
        else:
            weights.initialize(self._task.model, seed=seed, device=self.device)

    def _step(self) -> None:
        start, step = time.time(), self.state.step + 1
        batch = self._batch = self._batches.at(self.state.position)
        torch.manual_seed(step_seed(self.config.training.seed, step, self._rank))
        loss = self._forward_backward(batch, step)
        norm = self._clip()
        self._faults.in_step("before_optimizer", step=step)
        signals = (*self._checkpointer.signals(), self._stop.signal())
        metrics = self._metrics.reduce(step, batch, loss=loss, norm=norm, signals=signals)
        for group in self.state.optimizer.param_groups:
            group["lr"] = self._learning_rate_at(step)
        self._checkpointer.before_optimizer_step()
        update_if_finite(self.state.optimizer, metrics.is_finite)
        self.state.optimizer.zero_grad()
        self.state.step = step
        self.state.position += self.config.data.global_batch_samples
        self._ledger.append(step, batch)
        self._checkpointer.after_optimizer_step(self.state, metrics.notes)
        self._faults.in_step("after_optimizer", step=step)
        self._read(self._metrics.push(metrics))
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

    def _read(self, reading: Reading | None) -> None:
        if reading is None:
            return
        *signals, stops = reading.signals
        self._checkpointer.learn(reading.step, signals)
        self._stop.learn(stops)
        self._report_snapshot()
        if not self._guard.accepts(reading):
            return
        self._emit_metrics(reading.step, reading.loss_sum, reading.gradient_norm)
        last = reading.step == self.config.training.steps
        if self._rank == 0 and (last or reading.step % self.config.training.log_every_steps == 0):
            self._log(reading.step, reading.loss_sum / self._tokens_per_step(), reading.gradient_norm)

    def _report_snapshot(self) -> None:
        """Tell where a restart would begin; rank 0 stands for all, which are at most a step apart."""
        step = self._checkpointer.snapshot_step
        if self._rank == 0 and step != self._reported_snapshot:
            self._reported_snapshot = step
            self._events.emit("checkpoint", step=step, status="snapshot")

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

    def _evaluate(self, attempt: Attempt) -> None:
        with self._events.span("evaluate", step=self.state.step), self._monitor.section("step"):
            loss = self._evaluator.loss(attempt.ping)
        self._events.emit("evaluation", step=self.state.step, loss=loss)
        if self._rank == 0:
            logger.info("step %d  validation loss %.4f", self.state.step, loss)

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


def uses_bf16(config: JobConfig, device: torch.device) -> bool:
    """Tell whether forward and backward run in bf16; weights are fp32 in any case."""
    precision = config.training.precision
    return precision == "bf16" or (precision == "auto" and device.type == "cuda")
