"""Durable checkpoints: when to save, that the last one has ended, and what to resume from."""

from __future__ import annotations

import logging
import time
import uuid
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
import torch.distributed.checkpoint as dcp
from torch import Tensor

from training import commit
from training.config import CheckpointConfig
from training.drain import Save
from training.errors import CheckpointError
from training.events import EventLog
from training.state import TrainState
from training.writers import DcpSyncWriter, HoldfastWriter, NvrxTorchWriter, Writer, load_rank_file

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
# After a fault in another rank this rank's writer is usually seconds from a newer checkpoint; waiting
# longer than this costs more than the steps that it would save.
_RESTORE_WAIT_SECONDS = 30.0


class Checkpointer:
    """Saves and restores the training state of a run. Made once a process, kept over in-process restarts."""

    def __init__(
        self,
        config: CheckpointConfig,
        run_dir: Path,
        *,
        device: torch.device,
        events: EventLog,
        node: str,
    ) -> None:
        self.root = run_dir / "checkpoints"
        self._config, self._events = config, events
        self._writer = _make_writer(config, run_dir, device=device, events=events, node=node)
        self._attempt = ""
        self._pending: Save | None = None

    def restore(self, state: TrainState) -> int | None:
        """Load the newest checkpoint that verifies, on all ranks; return its step, None on a first start.

        Raises:
            CheckpointError: Checkpoints exist, but none can be loaded.
        """
        if self._pending is not None:
            self._let_writer_end(min(self._pending.deadline, time.time() + _RESTORE_WAIT_SECONDS))
            self._pending = None
        self._attempt = broadcast_object(uuid.uuid4().hex[:12])
        directory = self._choose()
        tensors = state.tensors()
        self._writer.prepare(tensors)
        if directory is None:
            return None
        self._load(directory, tensors)
        state.adopt(tensors)
        self._events.emit("restored", step=state.step, source=str(directory))
        return state.step

    def maybe_save(self, state: TrainState, *, last: bool) -> bool:
        """Start a save if this step is due; return whether it was.

        The previous save is ended first, so that two never overlap.
        """
        if not last and state.step % self._config.every_steps:
            return False
        self.finalize()
        save = Save(
            root=self.root,
            step=state.step,
            position=state.position,
            attempt=self._attempt,
            world_size=dist.get_world_size(),
            keep=self._config.keep,
            deadline=time.time() + self._config.deadline_seconds,
        )
        self._pending = save
        self._writer.begin(save, state.tensors())
        self._events.emit("checkpoint", step=state.step, status="scheduled")
        return True

    def before_optimizer_step(self) -> None:
        self._writer.before_optimizer_step()

    def finalize(self) -> bool:
        """Wait, up to its deadline, until the previous save has ended; return whether it went well.

        Training goes on after a failed save: it is counted, and the checkpoint before it stays.
        """
        save = self._pending
        if save is None:
            return True
        settled = self._let_writer_end(save.deadline)
        self._pending = None
        # the coordinator's worker commits, and its own part ends with that
        succeeded = settled and (dist.get_rank() != 0 or _is_committed(save))
        if not succeeded:
            reason = "not committed" if settled else "no end before checkpoint.deadline_seconds"
            self._events.emit("checkpoint", step=save.step, status="failed", reason=reason)
            logger.warning("checkpoint of step %d failed: %s; training goes on", save.step, reason)
        return succeeded

    def finalize_last(self) -> None:
        """End the run's last save on all ranks.

        Raises:
            CheckpointError: It failed, so the run's result is not durable.
        """
        outcomes: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(outcomes, self.finalize())
        if not all(outcomes):
            failed = [rank for rank, outcome in enumerate(outcomes) if not outcome]
            raise CheckpointError(f"the last checkpoint failed on ranks {failed}; see the run's events")

    def close(self) -> None:
        self._writer.close()

    def _let_writer_end(self, deadline: float) -> bool:
        while not self._writer.settled():
            if time.time() > deadline:
                self._writer.abandon()
                return False
            time.sleep(_POLL_SECONDS)
        return True

    def _choose(self) -> Path | None:
        """Agree on the newest checkpoint of which every file is whole; refuse others with the reason."""
        candidates: list[Path] = broadcast_object(commit.committed_checkpoints(self.root))
        for directory in candidates:
            problem = self._check(directory)
            if problem is None:
                return directory
            self._events.emit("refused", source=str(directory), reason=problem)
            if dist.get_rank() == 0:
                logger.warning("checkpoint refused: %s", problem)
        if candidates:
            raise CheckpointError(
                f"{self.root}: holds {len(candidates)} checkpoints and none can be used, see above; restore "
                "one from a copy, or start a new run directory"
            )
        return None

    def _check(self, directory: Path) -> str | None:
        """Verify with all ranks, each hashing its share of the files."""
        problem: str | None = None
        try:
            commit.verify(directory, part=dist.get_rank(), parts=dist.get_world_size())
        except CheckpointError as error:
            problem = str(error)
        problems: list[Any] = [None] * dist.get_world_size()
        dist.all_gather_object(problems, problem)
        return next((found for found in problems if found is not None), None)

    def _load(self, directory: Path, tensors: Mapping[str, Tensor]) -> None:
        manifest = commit.read_manifest(directory)
        try:
            if manifest.format == "torch":
                load_rank_file(directory, tensors)
            else:
                dcp.load(dict(tensors), checkpoint_id=directory)
        except (RuntimeError, OSError, dcp.api.CheckpointException) as error:
            reason = " ".join(str(error).split())[:300]
            raise CheckpointError(f"{directory}: does not fit this model ({reason})") from error


def broadcast_object(value: Any) -> Any:
    """Return rank 0's value on every rank."""
    holder = [value]
    dist.broadcast_object_list(holder, src=0)
    return holder[0]


def _make_writer(
    config: CheckpointConfig, run_dir: Path, *, device: torch.device, events: EventLog, node: str
) -> Writer:
    if config.writer == "dcp_sync":
        return DcpSyncWriter()
    if config.writer == "nvrx_torch":
        return NvrxTorchWriter(device=device)
    return HoldfastWriter(run_dir, device=device, events=events, node=node)


def _is_committed(save: Save) -> bool:
    directory = commit.committed_path(save.root, save.step)
    try:
        return commit.read_manifest(directory).attempt == save.attempt
    except CheckpointError:
        return False
