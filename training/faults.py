"""Planned faults of a rehearsal, each of which hits once over all restarts.

A fault leaves its mark in `RUN_DIR/faults/` before it hits, so that the step that is done again after
it is left in peace. Outside of a rehearsal the plan is dead, whatever the recipe says.
"""

from __future__ import annotations

import math
import os
import signal
import time
from pathlib import Path
from typing import TYPE_CHECKING, Any

from training import environment, fault_damage
from training.config import JobConfig
from training.events import EventLog
from training.fault_config import Fault, FaultKind, SetupPoint, StepPoint, causes

if TYPE_CHECKING:
    from torch import Tensor

POLL_SECONDS = 0.05
SIGNALS = {
    "sigkill": signal.SIGKILL,
    "sigstop": signal.SIGSTOP,
    "corrupt_snapshot": signal.SIGKILL,
    "corrupt_checkpoint": signal.SIGKILL,
}
# The rank goes no further: it waits for what the cluster (rehearsal/simulation.py) or a layer does to it.
ENDLESS = ("hang", "launcher_kill", "node_loss")


class InjectedFault(Exception):
    """The exception of a planned fault."""


class FaultPlan:
    """The faults of one rank that are still to come, and where they hit."""

    def __init__(self, config: JobConfig, *, run_dir: Path, rank: int, node: str, events: EventLog) -> None:
        """Arm the faults.

        Args:
            config: The recipe; its faults leave marks in the run directory when they hit.
            run_dir: Directory of the run.
            rank: Rank of this process.
            node: Its (real or simulated) machine.
            events: Log that takes the `fault` event.
        """
        armed = os.environ.get(environment.REHEARSAL) == "1"
        self._plan = config.rehearsal.faults
        self._own = {i: fault for i, fault in enumerate(self._plan) if armed and fault.rank == rank}
        self._directory, self._events = run_dir / "faults", events
        self._target = fault_damage.Target(run_dir=run_dir, job=config.job, rank=rank, node=node)

    def in_setup(self, point: SetupPoint) -> None:
        """Hit this rank if a fault is planned for this set-up.

        Raises:
            InjectedFault: The planned fault is an exception.
        """
        for index, fault in self._own.items():
            if fault.point == point and self._is_setup_of(fault):
                self._hit(index, fault, step=fault.step)

    def in_step(self, point: StepPoint, *, step: int) -> None:
        """Hit this rank if a fault is planned for this place in this step.

        Raises:
            InjectedFault: The planned fault is an exception.
        """
        self._hit_due(point, step)

    def in_forward(self, loss: Tensor, *, step: int) -> Tensor:
        """Do what is planned for this forward pass; return its loss, or NaN where that is planned.

        Raises:
            InjectedFault: The planned fault is an exception.
        """
        return loss * math.nan if "nan" in self._hit_due("forward", step) else loss

    def _hit_due(self, point: StepPoint, step: int) -> set[FaultKind]:
        due = [(i, fault) for i, fault in self._own.items() if fault.point == point and _is_due(fault, step)]
        return {fault.kind for index, fault in due if self._hit(index, fault, step=step)}

    def _is_setup_of(self, fault: Fault) -> bool:
        if fault.step == 0:
            return True
        return any(self._mark_of(cause).exists() for cause in causes(self._plan, fault))

    def _mark_of(self, index: int) -> Path:
        return self._directory / f"{index}"

    def _mark(self, index: int) -> bool:
        """Claim a fault for good; False if it has hit before."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            mark = os.open(self._mark_of(index), os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.fsync(mark)
        os.close(mark)
        directory = os.open(self._directory, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        return True

    def _hit(self, index: int, fault: Fault, *, step: int) -> bool:
        """Do it, unless it was done before; return only if the rank goes on, with whether it was done."""
        if self._mark_of(index).exists():
            return False
        where = {"index": index, "kind": fault.kind, "step": step, "point": fault.point}
        damage = self._damage(fault, index)
        if damage is None:
            self._events.emit("fault_missed", **where, reason="there is nothing to damage yet")
            return False
        if not self._mark(index):
            return False
        self._events.emit("fault", **where, **damage)
        if fault.kind == "exception":
            raise InjectedFault(f"planned fault {index}: rank {fault.rank}, step {fault.step}, {fault.point}")
        if fault.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.kind])
        elif fault.kind == "launcher_kill":
            os.kill(os.getppid(), signal.SIGKILL)
        elif fault.kind == "slow":
            self._sleep(index, fault)
        while fault.kind in ENDLESS:
            time.sleep(POLL_SECONDS)
        return True

    def _damage(self, fault: Fault, index: int) -> dict[str, Any] | None:
        """Damage what the fault names; return what its event says of it, None if there is nothing yet."""
        if fault.kind == "corrupt_snapshot":
            return self._target.flip_snapshot()
        if fault.kind == "corrupt_checkpoint":
            return self._target.flip_checkpoint()
        if fault.kind == "full_disk":
            fault_damage.fill_disk(self._directory.parent, rank=fault.rank)
        return {}

    def _sleep(self, index: int, fault: Fault) -> None:
        start = time.monotonic()
        time.sleep(fault.seconds)
        self._events.emit("fault_over", index=index, kind=fault.kind, seconds=time.monotonic() - start)


def _is_due(fault: Fault, step: int) -> bool:
    """Say whether a fault hits in this step; which step is saved is known only when it is."""
    return step >= fault.step if fault.point == "save" else step == fault.step
