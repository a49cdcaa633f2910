"""Settings of the state's tiers: `[checkpoint]`, `[checkpoint.local]` and `[snapshot]`."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import PurePosixPath
from typing import Annotated, Literal

from training.errors import Problem
from training.schema import FIXED, Count, Positive, Range, Seconds

Writer = Literal["holdfast", "nvrx_torch", "dcp_sync"]


@dataclass(frozen=True, kw_only=True, slots=True)
class LocalConfig:
    """Copies of every rank's own shard on a disk of its node (NVMe): quick, and lost with the node."""

    directory: str = ""
    """Directory on the node's own disk, such as "/local"; empty for no such copies."""
    every_steps: Positive = 20
    """Steps between copies. Every durable checkpoint begins with one, and is written from it."""
    keep: Annotated[int, Range(minimum=2)] = 2
    """Copies that are kept of a shard. Two at least: ranks end a copy at different times."""

    def problems(self) -> Iterator[Problem]:
        if self.directory and not PurePosixPath(self.directory).is_absolute():
            fix = "give the mount point of the node's disk"
            yield Problem(path="directory", value=self.directory, rule="must be an absolute path", fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class CheckpointConfig:
    """Durable checkpoints in DCP format, under the run directory."""

    writer: Annotated[Writer, FIXED] = "holdfast"
    """holdfast: asynchronous, by NVRx's persistent worker. nvrx_torch: TorchAsyncCheckpoint, GPU
    only. dcp_sync: the synchronous baseline."""
    every_steps: Positive = 100
    """Steps between checkpoints; the last step is always saved."""
    keep: Annotated[int, Range(minimum=2)] = 3
    """Committed checkpoints that are kept. One alone is refused: the newest may be the bad one."""
    deadline_seconds: Seconds = 900.0
    """Longest time from snapshot to commit; a save that takes longer is given up and counted."""
    overlap: Literal["defer", "wait"] = "defer"
    """When a checkpoint is due and the one before it is still being written. defer: train on, and save at
    the first step after it. wait: hold training up, so that checkpoints lie at multiples of every_steps."""
    local: LocalConfig = field(default_factory=LocalConfig)

    def problems(self) -> Iterator[Problem]:
        if self.local.directory and self.writer != "holdfast":
            rule = f'needs checkpoint.writer = "holdfast", not {self.writer!r}: copies are made of snapshots'
            fix = "change the writer, or leave the directory empty"
            yield Problem(path="local.directory", value=self.local.directory, rule=rule, fix=fix)


@dataclass(frozen=True, kw_only=True, slots=True)
class SnapshotConfig:
    """Copies of the training state in the nodes' memory, from which every restart begins."""

    every_steps: Literal["auto"] | Count = "auto"
    """Steps between snapshots; "auto" measures the first steps and takes every step where that is free,
    else the smallest interval that costs 0.5%. 0 for none: restarts then begin at a checkpoint."""
    slots: Annotated[int, Range(minimum=4)] = 4
    """Snapshots that a rank holds in /dev/shm: three that roll and one that a checkpoint is written from.
    Each further reader at the same time needs one more."""
