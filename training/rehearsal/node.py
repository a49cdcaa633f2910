"""One simulated pod: its process 1, and everything below it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
from collections.abc import Mapping, Sequence
from pathlib import Path

from training.processes import descendants, end_tree
from training.rehearsal.isolation import Isolation


class SimulatedPod:
    """A `training` command as process 1 of a node, or of the control store's pod."""

    def __init__(
        self,
        name: str,
        command: Sequence[str],
        *,
        isolation: Isolation,
        environ: Mapping[str, str],
        log: Path,
    ) -> None:
        """Start it.

        Args:
            name: Name of the node.
            command: Arguments of `python -m training`.
            isolation: What keeps it apart.
            environ: Variables beside ours.
            log: File that takes its output.
        """
        self.name, self._isolation = name, isolation
        self._killed = False
        with log.open("ab") as output:
            self._process = subprocess.Popen(
                isolation.command(name, [sys.executable, "-m", "training", *command]),
                env={**os.environ, **isolation.environ(name), **environ},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )

    @property
    def pid(self) -> int:
        """The child of ours to wait for; not process 1 where that has a namespace of its own."""
        return self._process.pid

    def poll(self) -> int | None:
        """Return the exit code of process 1, minus the signal if it died of one, or None while it runs."""
        code = self._process.poll()
        # util-linux 2.38 exits with 1 when its child was SIGKILLed
        return -signal.SIGKILL if code is not None and self._killed else code

    def send_signal(self, number: signal.Signals) -> None:
        """Signal process 1, unless it has ended."""
        for pid in self._first_process() if self.poll() is None else ():
            with contextlib.suppress(ProcessLookupError):  # it has ended just now
                os.kill(pid, number)
                self._killed = number == signal.SIGKILL

    def lose(self) -> None:
        """Kill everything in it, and its memory with it."""
        if self._isolation.is_real:
            # The kernel ends a pid namespace with its process 1
            self.send_signal(signal.SIGKILL)
            return
        # Stopped, so that it can't start anew what is killed below it
        self.send_signal(signal.SIGSTOP)
        end_tree(self._process.pid)
        self._isolation.free_memory(self.name)

    def _first_process(self) -> list[int]:
        if not self._isolation.is_real:
            return [self._process.pid]
        return descendants(self._process.pid)[:1]
