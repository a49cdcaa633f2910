"""The training state's keeper: snapshots in memory, durable checkpoints, and the way back from both.

Ranks take every decision at the same step without a collective of their own: what they have to tell each
other rides on the all-reduce of the loss (`signals`), whose result comes a step late (`learn`).
"""

from __future__ import annotations

import logging
import math
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

import torch
import torch.distributed as dist
from torch import Tensor

from training import drain
from training.cadence import Cadence
from training.config import JobConfig
from training.drain import Save
from training.errors import CheckpointError
from training.events import EventLog
from training.exchange import Exchange
from training.inventory import Tier
from training.layout import Place
from training.lineage import name_of
from training.restore import Restored, Restorer, ShardTier
from training.run_directory import read_run_id
from training.slots import NOTES, Mark
from training.state import TrainState
from training.tiers import make_copies, make_snapshots, make_writer

logger = logging.getLogger(__name__)

_POLL_SECONDS = 0.02
# With snapshots off a restart begins at a checkpoint: one that is seconds from its end is worth waiting for
_RESTORE_WAIT_SECONDS = 30.0


@dataclass(kw_only=True, slots=True)
class _Group:
    """What all ranks know of each other, a step late."""

    is_saving: bool = False
    is_copying: bool = False
    is_ready: bool = False
    has_room: bool = False


class Checkpointer:
    """Saves and restores the training state of a run. Made once a process, kept over in-process restarts."""

    def __init__(
        self,
        config: JobConfig,
        run_dir: Path,
        *,
        device: torch.device,
        events: EventLog,
        node: str,
    ) -> None:
        self.run_dir, self._config = run_dir, config.checkpoint
        self._events = events
        self._answer_seconds = config.recovery.setup_timeout_seconds
        self._has_memory_tier = config.snapshot.every_steps != 0
        self._snapshots = make_snapshots(config, device=device, events=events, node=node)
        self._copies = make_copies(config, run_dir, self._snapshots, events=events, node=node)
        self._writer = make_writer(config, self._snapshots, self._copies, device=device, node=node)
        self._cadence = Cadence(setting=config.snapshot.every_steps, in_background=device.type == "cuda")
        self._group = _Group()
        self._lineage = 0
        self._notes = torch.zeros(NOTES, dtype=torch.float64, device=device)
        self._pending: Save | None = None
        self._begun_step, self._copied_step, self._taken_step, self._failure = -1, -1, -1, ""
        self._is_due = self._is_copy_due = False

    @property
    def lineage(self) -> str:
        """Name of the lineage that the run is in."""
        return name_of(self._lineage)

    def restore(
        self,
        state: TrainState,
        place: Place,
        *,
        before: int | None = None,
        again: int = 0,
        meanwhile: Callable[[], None] = lambda: None,
    ) -> Restored:
        """Load the newest state that all ranks can have.

        Args:
            state: Filled in place.
            place: Which part of it this rank holds.
            before: Step that was bad: only states before it are used, and the others are left for good.
            again: Restores that the process group has done before this one.
            meanwhile: Called while the restore is going on.

        Raises:
            CheckpointError: Checkpoints exist, but none can be loaded.
            RunError: Some ranks do not answer, or the slots do not fit into memory.
        """
        exchange = Exchange(f"restore/{again}", timeout_seconds=self._answer_seconds)
        run = exchange.first("run id", read_run_id(self.run_dir) if dist.get_rank() == 0 else None)
        restorer = Restorer(self.run_dir, exchange=exchange, tiers=self._tiers(), events=self._events)
        if not self._has_memory_tier:
            self._let_writer_end(time.time() + _RESTORE_WAIT_SECONDS)
        ancestry = restorer.begin()
        meanwhile()
        self._settle_pending(exchange)
        tensors = state.tensors()
        with restorer.phase("prepare"):
            if self._snapshots is not None:
                self._snapshots.prepare(run, tensors, place)
            if self._copies is not None:
                self._copies.prepare(run)
            self._writer.prepare(tensors)
        restored = restorer.restore(tensors, ancestry, before=before)
        self._begin_lineage(restored, exchange)
        if restored.source is None:
            state.clear()
        else:
            state.adopt(step=restored.step, position=restored.position)
        return restored

    def before_optimizer_step(self) -> None:
        """Order the next change of the tensors behind a snapshot that is still being copied."""
        if self._snapshots is not None:
            self._snapshots.before_optimizer_step()

    def after_optimizer_step(self, state: TrainState, notes: Tensor) -> None:
        """Take a snapshot if one is due.

        Args:
            state: The state after the step.
            notes: Numbers on the device that are kept with it, see `Restored.notes`.
        """
        self._notes = notes
        if self._snapshots is None:
            return
        if self._group.has_room and self._cadence.due(state.step):
            self._snapshots.take(self._mark(state), notes)
            self._taken_step, self._group.has_room = state.step, self._group.is_ready
        if self._group.is_ready:
            self._cadence.measure(now=time.monotonic(), costs_seconds=self._snapshots.costs_seconds())
        self._snapshots.set_up()

    def signals(self) -> tuple[float, ...]:
        """Return what the other ranks have to know, to be summed over all of them."""
        self._poll()
        own = self._own()
        facts = (own.is_saving, own.is_copying, own.is_ready, own.has_room)
        return (*map(float, facts), *self._cadence.offer())

    def _own(self) -> _Group:
        """Return what this rank tells the others of itself."""
        snapshots = self._snapshots
        return _Group(
            is_saving=self._pending is not None,
            is_copying=self._copies is not None and self._copies.is_busy,
            is_ready=snapshots is not None and snapshots.ready(),
            has_room=snapshots is not None and snapshots.has_room(),
        )

    def learn(self, step: int, sums: Sequence[float]) -> None:
        """Take the sums of `signals` that all ranks gave at `step`."""
        ranks = dist.get_world_size()
        saving, copying, ready, room, *offers = sums
        # a save that was begun after these signals were given is not in them
        self._group = _Group(
            is_saving=saving > 0 or step <= self._begun_step,
            is_copying=copying > 0 or step <= self._copied_step,
            is_ready=ready == ranks,
            # Until all slots are there, all ranks take the same snapshots: one that has taken more than
            # another would overwrite the newest that they have in common.
            has_room=ready == ranks or (room == ranks and step > self._taken_step),
        )
        reason = self._cadence.decide((offers[0], offers[1], offers[2]), ranks=ranks)
        if reason is not None:
            self._events.emit("snapshot_interval", every_steps=self._cadence.every_steps, reason=reason)
            if dist.get_rank() == 0:
                logger.info("snapshots: %s", reason)

    def maybe_save(self, state: TrainState, *, last: bool, until: float = math.inf) -> bool:
        """Start a durable save, or a copy on the node's disk, if one is due; return whether it was.

        Saves never overlap: one that is due while another is being written, or before the slots are there,
        waits for that, and training waits too only at the last step or where `checkpoint.overlap` says so.

        Args:
            state: What is saved.
            last: Save it whether or not it is due.
            until: When to give it up at the latest, seconds since the epoch.
        """
        local = self._config.local
        self._is_due |= last or state.step % self._config.every_steps == 0
        self._is_copy_due |= self._copies is not None and state.step % local.every_steps == 0
        if self._is_due and (last or self._config.overlap == "wait"):
            self._end_previous(until)
        elif self._group.is_copying or not self._can_hold():
            return False
        elif self._group.is_saving or not self._is_due:
            return self._is_copy_due and self._begin_copy(state)
        self._is_due = self._is_copy_due = False
        self._begin(state, until)
        return True

    def _end_previous(self, until: float) -> None:
        """Wait until the previous save has ended: on all ranks, or on this one where the store is lost."""
        try:
            self.finalize(until=until)
        except dist.DistError as error:
            # the commit is the work of rank 0's checkpoint worker, which needs no store
            logger.warning("no control store (%s): this save does not wait for the other ranks'", error)
        if self._copies is not None and until < math.inf:
            self._copies.give_up()
        elif self._copies is not None:
            self._copies.wait()

    def _can_hold(self) -> bool:
        """Say whether all ranks have their slots: locking pages takes seconds, and a save would wait."""
        return self._group.is_ready or self._config.writer != "holdfast"

    @property
    def snapshot_step(self) -> int:
        """Newest step whose snapshot this rank has whole; 0 without one."""
        return self._snapshots.newest_step() if self._snapshots is not None else 0

    def has_begun(self, step: int) -> bool:
        """Return whether this attempt has started the checkpoint of `step`."""
        return self._begun_step == step

    def finalize(self, *, until: float = math.inf) -> list[int]:
        """Wait, up to its deadline, until the previous save has ended on all ranks.

        Args:
            until: When to give it up at the latest, seconds since the epoch.

        Returns:
            Ranks on which it failed.
        """
        if self._pending is not None:
            if until < math.inf:
                self._writer.hurry()
            self._let_writer_end(min(self._pending.deadline, until))
        # not a collective: its timeout is for steps, and storage may be far slower
        seconds = self._config.deadline_seconds + self._answer_seconds
        # the lineage, since a step that was rolled back is saved twice in one process group
        exchange = Exchange(f"save/{self.lineage}/{self._begun_step}", timeout_seconds=seconds)
        outcomes = exchange.gather(f"end of the save of step {self._begun_step}", self._failure)
        return [rank for rank, outcome in enumerate(outcomes) if outcome]

    def finalize_last(self) -> None:
        """End the run's last save on all ranks.

        Raises:
            CheckpointError: It failed, so the run's result is not durable.
        """
        failed = self.finalize()
        if failed:
            raise CheckpointError(f"the last checkpoint failed on ranks {failed}; see the run's events")

    def close(self, *, sweep: bool = True) -> None:
        """End the worker.

        Args:
            sweep: Free the node's memory too: the run is done.
        """
        self._writer.close()
        if self._copies is not None:
            self._copies.close(sweep=sweep)
        if self._snapshots is not None:
            self._snapshots.close(sweep=sweep)

    def _tiers(self) -> dict[Tier, ShardTier]:
        tiers: dict[Tier, ShardTier] = {}
        if self._snapshots is not None and self._has_memory_tier:
            tiers["memory"] = self._snapshots
        if self._copies is not None:
            tiers["local"] = self._copies
        return tiers

    def _mark(self, state: TrainState) -> Mark:
        return Mark(lineage=self._lineage, step=state.step, position=state.position)

    def _begin(self, state: TrainState, until: float) -> None:
        save = Save(
            run_dir=self.run_dir,
            mark=self._mark(state),
            world_size=dist.get_world_size(),
            keep=self._config.keep,
            deadline=min(until, time.time() + self._config.deadline_seconds),
            is_urgent=until < math.inf,
        )
        self._failure = ""
        if self._writer.begin(save, state.tensors(), self._notes):
            self._pending = save
            self._events.emit("checkpoint", step=save.step, status="scheduled")
        else:
            self._count_failure(save, "no snapshot slot is free; raise snapshot.slots")
        self._begun_step, self._group.is_saving = save.step, True
        # it begins with a copy on the node's disk, if there are any
        self._copied_step = save.step
        self._group.is_copying = self._copies is not None and not save.is_urgent

    def _begin_copy(self, state: TrainState) -> bool:
        assert self._copies is not None
        self._is_copy_due = False
        deadline = time.time() + self._config.deadline_seconds
        has_begun = self._copies.save(self._mark(state), self._notes, deadline=deadline)
        # also on a rank that had no slot: all must go on deciding alike
        self._copied_step, self._group.is_copying = state.step, True
        return has_begun

    def _poll(self) -> None:
        """Notice the end of the pending save; give it up at its deadline."""
        if self._copies is not None:
            self._copies.poll()
        save = self._pending
        if save is None:
            return
        outcome = self._writer.outcome()
        if outcome is not None:
            self._pending = None
            if outcome.failure:
                self._count_failure(save, outcome.failure)
        elif time.time() > save.deadline:
            self._give_up(save)

    def _give_up(self, save: Save) -> None:
        self._writer.abandon()
        self._pending = None
        self._count_failure(save, "no end before checkpoint.deadline_seconds, or the end of the grace")

    def _count_failure(self, save: Save, reason: str) -> None:
        self._failure = reason
        self._events.emit("checkpoint", step=save.step, status="failed", reason=reason)
        logger.warning("checkpoint of step %d failed: %s; training goes on", save.step, reason)

    def _let_writer_end(self, until: float) -> None:
        """Wait for the pending save, but not beyond `until` (seconds since the epoch)."""
        while self._pending is not None:
            if time.time() > until:
                self._give_up(self._pending)
                return
            self._poll()
            time.sleep(_POLL_SECONDS)

    def _settle_pending(self, exchange: Exchange) -> None:
        """After a fault: let a save go on that all ranks are still writing; else give it up."""
        own = self._pending.mark.words() if self._pending is not None else None
        told = exchange.gather("pending save", own)
        if all(answer == told[0] for answer in told):
            return
        if self._pending is not None:
            drain.cancel(self._pending)

    def _begin_lineage(self, restored: Restored, exchange: Exchange) -> None:
        self._lineage = restored.lineage
        self._cadence.reset()
        self._begun_step, self._copied_step, self._taken_step, self._failure = -1, -1, -1, ""
        self._is_due = self._is_copy_due = False
        if self._snapshots is not None and self._snapshots.can_set_up_at_once:
            self._snapshots.set_up()
        told = [_Group(**answer) for answer in exchange.gather("ready", asdict(self._own()))]
        self._group = _Group(
            is_saving=any(rank.is_saving for rank in told),
            is_copying=any(rank.is_copying for rank in told),
            is_ready=all(rank.is_ready for rank in told),
            has_room=all(rank.has_room for rank in told),
        )
