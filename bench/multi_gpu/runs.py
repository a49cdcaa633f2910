"""Runs of the trainer that are watched from outside and ended once enough was seen."""

from __future__ import annotations

import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from training import environment
from training.processes import end_tree
from training.rehearsal.progress import EventTail

Event = Mapping[str, Any]

_POLL_SECONDS = 0.2
_TAIL_LINES = 30


class BenchmarkError(Exception):
    """A run did not get as far as it has to; the message ends with the end of its log."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Settings:
    """What all measurements share."""

    directory: Path
    """Where recipes, runs and logs go."""
    data: Path
    """Token shards."""
    device: str
    """`cuda` or `cpu`."""
    gpus: int
    """Ranks at most: one a GPU."""
    tiny: bool = False
    """Smallest sizes, to try it out."""


def by_torchrun(recipe: Path, run_dir: Path, *, ranks: int) -> list[str]:
    """Return the command of a run without restart layers."""
    launcher = ["-m", "torch.distributed.run", "--standalone", f"--nproc-per-node={ranks}"]
    return [sys.executable, *launcher, "-m", "training", "run", str(recipe), "--run-dir", str(run_dir)]


def by_launch(recipe: Path, run_dir: Path) -> list[str]:
    """Return the command of a run as a pod starts it."""
    return [sys.executable, "-m", "training", "launch", str(recipe), "--run-dir", str(run_dir)]


@dataclass(kw_only=True)
class Run:
    """One run; leaving the `with` block ends all of its processes and frees its snapshots."""

    name: str
    command: Sequence[str]
    directory: Path
    environ: Mapping[str, str] = field(default_factory=dict)
    keep_checkpoints: bool = False
    events: list[Event] = field(default_factory=list)

    def __enter__(self) -> Self:
        self.directory.mkdir(parents=True, exist_ok=True)
        self._log = self.directory / "bench.log"
        self._memory = environment.shared_memory() / f"bench-{self.name}-{os.getpid()}"
        self._memory.mkdir(parents=True, exist_ok=True)
        self._tail = EventTail(self.directory)
        with self._log.open("ab") as log:
            self._process = subprocess.Popen(
                list(self.command),
                env={
                    **os.environ,
                    environment.SHARED_MEMORY: str(self._memory),
                    environment.NODE: "bench",
                    **self.environ,
                },
                stdout=log,
                stderr=subprocess.STDOUT,
                start_new_session=True,
            )
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        if self._process.poll() is None:
            self._process.send_signal(signal.SIGSTOP)  # it must not start anew what is killed below it
            end_tree(self._process.pid)
            self._process.kill()
        self._process.wait()
        shutil.rmtree(self._memory, ignore_errors=True)
        if not self.keep_checkpoints:
            shutil.rmtree(self.directory / "checkpoints", ignore_errors=True)

    def poll(self) -> None:
        """Read new events."""
        self.events.extend(self._tail.read())

    def skip_old_events(self) -> None:
        """Leave out what an earlier run in the same directory has written."""
        self._tail.read()

    def is_over(self) -> bool:
        return self._process.poll() is not None

    def failure(self) -> BenchmarkError:
        lines = self._log.read_text(errors="replace").splitlines()[-_TAIL_LINES:]
        return BenchmarkError(f"{self.name}: ended with {self._process.poll()}\n" + "\n".join(lines))

    def step(self) -> int:
        """Return the last step that rank 0 has finished."""
        return max((int(event["step"]) for event in steps_of_rank_0(self.events)), default=0)


def wait_for(runs: Sequence[Run], done: Callable[[Run], bool], *, seconds: float, ends: bool = False) -> None:
    """Wait until `done` holds for every run.

    Args:
        runs: Runs that go on side by side.
        done: Condition on a run's events.
        seconds: Longest wait.
        ends: The runs may end by themselves.

    Raises:
        BenchmarkError: A run ended too early, or the time was not enough.
    """
    deadline = time.monotonic() + seconds
    while True:
        for run in runs:
            run.poll()
        waiting = [run for run in runs if not done(run)]
        if not waiting:
            return
        for run in waiting:
            if run.is_over():
                run.poll()
                if not (ends and done(run)):
                    raise run.failure()
            elif time.monotonic() > deadline:
                raise BenchmarkError(f"not done after {seconds:.0f} s; {run.failure()}")
        time.sleep(_POLL_SECONDS)


def steps_of_rank_0(events: Sequence[Event]) -> list[Event]:
    return [event for event in events if event["event"] == "step" and event.get("rank") == 0]


def seconds_per_step(events: Sequence[Event], *, first: int, last: int) -> float:
    """Return the mean time of the steps `first` to `last`, from the start of the one to that of the next."""
    starts = {int(event["step"]): float(event["start"]) for event in steps_of_rank_0(events)}
    return (starts[last + 1] - starts[first]) / (last + 1 - first)
