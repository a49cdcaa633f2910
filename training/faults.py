"""Planned faults of a rehearsal, each of which hits once over all restarts.

A fault leaves its mark in `RUN_DIR/faults/` before it hits, so that the step that is done again after
it is left in peace. Outside of a rehearsal the plan is dead, whatever the recipe says.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Sequence
from pathlib import Path

from training import environment
from training.events import EventLog
from training.fault_config import Fault, FaultPoint

POLL_SECONDS = 0.05
SIGNALS = {"sigkill": signal.SIGKILL, "sigstop": signal.SIGSTOP}
# The rank goes no further: it waits for what the cluster (rehearsal/simulation.py) or a layer does to it.
ENDLESS = ("hang", "launcher_kill", "node_loss")


class InjectedFault(Exception):
    """The exception of a planned fault."""


class FaultPlan:
    """Faults that are still to come, and where they hit."""

    def __init__(self, faults: Sequence[Fault], *, directory: Path, events: EventLog) -> None:
        """Arm the faults.

        Args:
            faults: All faults of the recipe.
            directory: Where faults that hit leave their marks.
            events: Log that takes the `fault` event.
        """
        armed = os.environ.get(environment.REHEARSAL) == "1"
        self._faults = dict(enumerate(faults)) if armed else {}
        self._directory, self._events = directory, events

    def at(self, *, step: int, rank: int, point: FaultPoint) -> None:
        """Hit this rank if a fault is planned for here.

        Raises:
            InjectedFault: The planned fault is an exception.
        """
        for index, fault in self._faults.items():
            if (fault.step, fault.rank, fault.point) == (step, rank, point) and self._mark(index):
                self._hit(index, fault)

    def _mark(self, index: int) -> bool:
        """Claim a fault for good; False if it has hit before."""
        self._directory.mkdir(parents=True, exist_ok=True)
        try:
            mark = os.open(self._directory / f"{index}", os.O_CREAT | os.O_EXCL | os.O_WRONLY)
        except FileExistsError:
            return False
        os.fsync(mark)
        os.close(mark)
        directory = os.open(self._directory, os.O_RDONLY)
        os.fsync(directory)
        os.close(directory)
        return True

    def _hit(self, index: int, fault: Fault) -> None:
        self._events.emit("fault", index=index, kind=fault.kind, step=fault.step, point=fault.point)
        if fault.kind == "exception":
            where = f"rank {fault.rank}, step {fault.step}, {fault.point}"
            raise InjectedFault(f"planned fault {index}: {where}")
        if fault.kind in SIGNALS:
            os.kill(os.getpid(), SIGNALS[fault.kind])
        elif fault.kind == "launcher_kill":
            os.kill(os.getppid(), signal.SIGKILL)
        while fault.kind in ENDLESS:
            time.sleep(POLL_SECONDS)
