"""The run's append-only event log: one JSON line an event, one file a process.

Files lie under `RUN_DIR/events/`. A line is written by one `write` call on a file opened for append,
so a SIGKILL loses at most the line being written; `read_events` skips a torn last line.

Every line holds `time` (seconds since the epoch), `event`, `role` (`rank`, `writer`, `launcher`,
`supervisor`, `rehearsal`), `node`, `pid` and, for ranks, `rank`, `round` (in-job restart that the
process belongs to) and `iteration` (in-process restart within the process). A checkpoint's writer is a
process of its own, and its lines hold `rank`.

Events of a rank:

    enter        process reached Python; `born` is the time the kernel made it
    span         something that took time: `name`, `start`, `seconds`; names are in SPANS
    step         a step was committed: `step`, `start`, `seconds`, `tokens`
    metrics      what it computed, read from the device a step late: `step`, `loss`, `gradient_norm`,
                 `learning_rate`
    non_finite   a loss or gradient norm was NaN or infinite, and its update left out: `step`, `action`,
                 `loss`, `gradient_norm`, `own_loss` (of this rank's samples), `sample_ids`, `skipped` so far
    parked       the rank was told to stop, and did after a step: `step`, `durable`
    fault        a planned fault is about to hit: `index`, `kind`, `step`, `point`; also `damaged_step` or
                 `damaged_path`. What proves that it did: training/fault_config.py
    fault_over   a planned fault that training sits through has ended: `index`, `seconds`
    fault_missed a planned fault could not be done: `index`, `reason`
    exception    the training function ended in an exception: `type`, `message`, and `step`, the one
                 after the last that was committed or restored (null before that); `notes`: its samples
    reentry      the in-process layer calls the training function again
    restored     state was loaded: `step`, `source` (memory, local, durable), `path`, `lineage` that begins,
                 `parent`, `phases` (seconds by name)
    refused      a state was not used: `source`, `tier`, `step`, `reason`
    snapshot     a snapshot was skipped: `step`, `status`, `skipped` (so far)
    snapshot_interval   what "auto" has decided: `every_steps`, `reason`
    checkpoint   a save changed state: `step`, `status` (snapshot, scheduled, committed, failed)
    local_copy   a copy on the node's disk ended: `step`, `status` (whole, failed, skipped), `seconds`,
                 `reason`
    evaluation   `step`, `loss`
    done         the run's last step is durable
Events of a launcher (training/nvrx_changes.py):

    round            ranks were started: `round`, `workers` (rank to pid)
    worker_exit      a rank's process ended: `rank`, `worker_pid`, `exit_code` or `signal`, `stopped` (by us)
    control_lost     the control store does not answer: `message`
    control_answers  the same store is heard again after `seconds`
Events of a supervisor (training/launch.py):

    launch           a launcher is started: `attempt`
    launcher_exit    it ended: `exit_code`, `signal`
    exit             the node is done: `exit_code`
Events of a rehearsal (training/rehearsal/simulation.py):

    process_exit     a node's supervisor or the control store ended: `name`, `exit_code`, `signal`
"""

from __future__ import annotations

import json
import os
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from training.files import listing

SPANS = (
    "imports",  # process start to the first line of training code
    "layers",  # restart layers made ready
    "rendezvous",  # process group made and proven by a collective
    "build",  # model and optimizer on the device
    "load",  # state restored and verified
    "step",
    "save",  # training thread held up by a checkpoint
    "evaluate",
    "finalize",  # waiting for the last checkpoint's commit
)


class EventLog:
    """Appends events of one process to its own file."""

    def __init__(self, run_dir: Path, *, role: str, node: str, **common: Any) -> None:
        """Open the log.

        Args:
            run_dir: Directory of the run.
            role: Kind of process; part of the file name.
            node: Name of the (real or simulated) machine.
            common: Fields that every line carries, such as `rank`.
        """
        directory = run_dir / "events"
        directory.mkdir(parents=True, exist_ok=True)
        self.path = directory / f"{role}-{node}-{os.getpid()}-{time.time_ns()}.jsonl"
        self._common = {"role": role, "node": node, "pid": os.getpid(), **common}
        self._file = self.path.open("ab", buffering=0)
        self.last_step: int | None = None
        """Step that was committed or restored last in the current attempt."""

    def emit(self, event: str, **fields: Any) -> None:
        """Append one line; `time` may be passed to date an event back."""
        if event in ("step", "restored"):
            self.last_step = fields["step"]
        line = {"time": time.time(), "event": event, **self._common, **fields}
        self._file.write(json.dumps(line, separators=(",", ":")).encode() + b"\n")

    def update(self, **common: Any) -> None:
        """Change fields that every later line carries."""
        self._common.update(common)

    @contextmanager
    def span(self, name: str, **fields: Any) -> Iterator[None]:
        """Measure a block; a block that raises is recorded with `failed`."""
        start = time.time()
        try:
            yield
        except BaseException:
            self.emit("span", name=name, start=start, seconds=time.time() - start, failed=True, **fields)
            raise
        self.emit("span", name=name, start=start, seconds=time.time() - start, **fields)

    def span_since(self, name: str, start: float, **fields: Any) -> None:
        """Record a span that began at `start` (seconds since the epoch) and ends now."""
        self.emit("span", name=name, start=start, seconds=time.time() - start, **fields)

    def close(self) -> None:
        self._file.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Return all events of a run, ordered by time."""
    events: list[dict[str, Any]] = []
    for path in listing(run_dir, "events/*.jsonl"):
        for line in path.read_bytes().splitlines():
            try:
                events.append(json.loads(line))
            except json.JSONDecodeError:
                continue  # torn by a kill while it was written
    return sorted(events, key=lambda event: float(event["time"]))


def process_start_seconds(pid: int | None = None) -> float:
    """Return when the kernel made a process, in seconds since the epoch (10 ms steps; Linux)."""
    stat = Path(f"/proc/{pid or os.getpid()}/stat").read_text().rsplit(")", 1)[1].split()
    boot = time.time() - float(Path("/proc/uptime").read_text().split()[0])
    return boot + int(stat[19]) / os.sysconf("SC_CLK_TCK")
