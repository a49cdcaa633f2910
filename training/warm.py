"""What a fork server does once, so that no rank has to do it again."""

from __future__ import annotations

import gc
import importlib
import logging
import os
import threading

from training.config import JobConfig
from training.errors import HoldfastError

MODULES = (
    "nvidia_resiliency_ext.checkpointing.async_ckpt.core",
    "nvidia_resiliency_ext.fault_tolerance.launcher",
    "nvidia_resiliency_ext.inprocess",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "training.nvrx_changes",
    "training.worker",
    "training.wrapper_store",
    "training.writer_server",
)
COMPILER_MODULES = ("torch._dynamo", "torch._inductor.compile_fx")

log = logging.getLogger(__name__)

_done = False


def preload(config: JobConfig) -> None:
    """Import all that a rank and a launcher use, and open the data; start no thread and touch no GPU."""
    global _done
    # not told from gc.get_freeze_count(): Python 3.12 starts with objects that are frozen
    if _done:
        return
    _done = True
    for name in (*MODULES, *(COMPILER_MODULES if config.model.compile else ())):
        importlib.import_module(name)
    _import_model(config)
    _open_data(config)
    # Objects that live for ever need not be walked by every collection in every rank: NVRx collects
    # until nothing is left before each in-process re-entry.
    gc.collect()
    gc.freeze()
    threads = len(os.listdir("/proc/self/task"))
    if threads > 1 or threading.active_count() > 1:
        log.warning("the fork server has %d threads: ranks forked from it may hang", threads)


def _import_model(config: JobConfig) -> None:
    """Build the model on the meta device: transformers imports its parts only when they are used."""
    from training import model

    try:
        model.build_model(model.load_model_config(config.model))
    except HoldfastError as error:
        log.debug("left to the ranks to say: %s", error)


def _open_data(config: JobConfig) -> None:
    from training import worker

    try:
        worker.open_stores(config)
    except (HoldfastError, OSError) as error:
        log.debug("left to the ranks to say: %s", error)
