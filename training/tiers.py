"""Makes the parts that keep a rank's state, as the recipe asks for them."""

from __future__ import annotations

from pathlib import Path

import torch

from training.config import JobConfig
from training.events import EventLog
from training.local_copies import LocalCopies
from training.snapshot import Snapshots
from training.writers import DcpSyncWriter, HoldfastWriter, NvrxTorchWriter, Writer


def make_snapshots(
    config: JobConfig, *, device: torch.device, events: EventLog, node: str
) -> Snapshots | None:
    off = config.snapshot.every_steps == 0
    if off and config.checkpoint.writer != "holdfast":
        return None
    return Snapshots(
        count=1 if off else config.snapshot.slots,
        ranks_per_node=config.job.ranks_per_node,
        device=device,
        events=events,
        node=node,
    )


def make_copies(
    config: JobConfig, run_dir: Path, snapshots: Snapshots | None, *, events: EventLog, node: str
) -> LocalCopies | None:
    local = config.checkpoint.local
    if not local.directory:
        return None
    assert snapshots is not None
    return LocalCopies(
        Path(local.directory),
        keep=local.keep,
        run_dir=run_dir,
        snapshots=snapshots,
        events=events,
        node=node,
    )


def make_writer(
    config: JobConfig,
    snapshots: Snapshots | None,
    copies: LocalCopies | None,
    *,
    device: torch.device,
    node: str,
) -> Writer:
    if config.checkpoint.writer == "dcp_sync":
        return DcpSyncWriter()
    if config.checkpoint.writer == "nvrx_torch":
        return NvrxTorchWriter(device=device)
    assert snapshots is not None
    return HoldfastWriter(snapshots, node=node, copies=copies)
