"""One training process: `training run`, under ft_launcher, torchrun or alone.

What lives as long as the process (event log, checkpointer with its worker, token stores) is made here;
what a fault throws away is made by each attempt (process group, mesh, Trainer).
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import logging
import os
import time
from collections.abc import Mapping
from pathlib import Path

import torch
import torch.distributed as dist
from torch.distributed.device_mesh import DeviceMesh

from training import environment, restart
from training.checkpoint import Checkpointer
from training.config import JobConfig, check_timeouts, load_recipe
from training.determinism import set_determinism
from training.errors import EXIT_DONE, EXIT_STOPPED, ConfigError
from training.events import EventLog, process_start_seconds
from training.failures import counted_before_first_attempt
from training.faults import FaultPlan
from training.process_group import rank_and_world
from training.restart import Attempt, RankMonitor
from training.run_directory import RunDirectory, default_run_directory, make_run_directory
from training.shards import TokenStore
from training.trainer import Trainer

logger = logging.getLogger(__name__)


class Worker:
    """Runs attempts until the run is done."""

    def __init__(self, config: JobConfig, run_dir: Path) -> None:
        """Check everything that can be wrong before a process group exists.

        Raises:
            ConfigError: Too few or too many ranks, no data, timeouts that don't fit the device.
        """
        self._config = config
        self._directory = RunDirectory(path=run_dir)
        self._rank, self._world_size = _check_world(config)
        self.device = choose_device(config)
        _check_timeouts(config, self.device)
        set_determinism(config)
        self._training_store, self._validation_store = open_stores(config)
        node = environment.node_name()
        self._events = EventLog(
            run_dir,
            role="rank",
            node=node,
            rank=self._rank,
            round=environment.integer("TORCHELASTIC_RESTART_COUNT", 0),
            iteration=0,
        )
        born = process_start_seconds()
        self._events.emit("enter", born=born)
        self._events.span_since("imports", born)
        self._entered = time.time()
        self._monitor = RankMonitor()
        self._is_done = False
        self._checkpointer = Checkpointer(config, run_dir, device=self.device, events=self._events, node=node)
        self._faults = FaultPlan(config, run_dir=run_dir, rank=self._rank, node=node, events=self._events)

    def run(self) -> int:
        """Train to the end, or until all ranks are told to stop; return the exit code."""
        if self._directory.is_done():
            logger.info("%s: the run is done; nothing to do", self._directory.path)
            return EXIT_DONE
        restart.run_restartable(
            self._attempt,
            config=self._config,
            run_dir=self._directory.path,
            events=self._events,
            device=self.device,
        )
        self.close(sweep=self._is_done)
        return EXIT_DONE if self._is_done else EXIT_STOPPED

    def close(self, *, sweep: bool = True) -> None:
        """End the checkpoint worker and the log.

        Args:
            sweep: Remove the snapshots in memory too: nobody will resume.
        """
        self._checkpointer.close(sweep=sweep)
        self._events.close()

    def make_trainer(self) -> Trainer:
        """Build model, optimizer and data in the process group that is open, and restore the state."""
        self._directory.claim(
            self._config,
            data_identity=data_identity(self._config, self._training_store),
            owner=self._rank == 0,
        )
        return Trainer(
            self._config,
            device=self.device,
            mesh=make_mesh(self._config, self.device),
            training_store=self._training_store,
            validation_store=self._validation_store,
            checkpointer=self._checkpointer,
            events=self._events,
            monitor=self._monitor,
            faults=self._faults,
        )

    def _attempt(self, attempt: Attempt) -> None:
        self._events.update(iteration=attempt.iteration)
        if attempt.iteration == 0:
            self._events.span_since("layers", self._entered)
        elif self.device.type == "cuda":
            # FSDP takes new streams for each model, and cached memory stays with the stream that it was
            # allocated on: 2.4 GiB a restart of a 1B model on two GPUs (docs/benchmarks.md)
            torch.cuda.empty_cache()
        with self._monitor.section("setup"):
            self._faults.in_setup("setup")
            with self._events.span("rendezvous"):
                restart.open_group(
                    self.device,
                    iteration=attempt.iteration,
                    config=self._config.recovery,
                    meanwhile=lambda: self._faults.in_setup("rendezvous"),
                )
            trainer = self.make_trainer()
        try:
            self._is_done = trainer.train(attempt)
            if self._is_done and self._rank == 0:
                self._directory.mark_done(trainer.state.step)
            # a rank that left before DONE exists would end its launcher with success, and close the
            # rendezvous to a rank 0 that dies here
            dist.barrier()
        finally:
            trainer.close()
        if self._is_done:
            self._events.emit("done", step=trainer.state.step)
        restart.close_group()


def choose_device(config: JobConfig) -> torch.device:
    """Return this rank's device; a CPU where a GPU was expected is said once, with its cost."""
    wanted = config.training.device
    available = torch.cuda.is_available()
    if wanted == "cuda" and not available:
        raise ConfigError.of(
            "training.device", wanted, "needs a CUDA GPU and there is none", 'use "cpu" to rehearse'
        )
    if wanted == "cpu" or not available:
        if wanted == "auto" and int(os.environ.get("RANK", "0")) == 0:
            logger.warning("no GPU: training on the CPU in fp32, hundreds of times slower")
        return torch.device("cpu")
    device = torch.device("cuda", int(os.environ.get("LOCAL_RANK", "0")))
    torch.cuda.set_device(device)
    torch.set_float32_matmul_precision("high")
    return device


def make_mesh(config: JobConfig, device: torch.device) -> DeviceMesh:
    """Make the mesh: one dimension for plain FSDP, (replicate, shard) for HSDP."""
    world_size, replicas = dist.get_world_size(), config.job.replicas
    shape = (world_size,) if replicas == 1 else (replicas, world_size // replicas)
    names = ("shard",) if replicas == 1 else ("replicate", "shard")
    return restart.open_mesh(device, shape, names=names, config=config.recovery)


def open_stores(config: JobConfig) -> tuple[TokenStore, TokenStore | None]:
    """Open the training shards, and the validation shards where evaluation is on; once a process.

    A rank that is forked from a warm server finds them open: on a shared file system the look at
    thousands of shards takes seconds. The index is read again: data may have been prepared anew since.
    """
    training = _current_store(Path(config.data.path) / "train", "data.path")
    if not config.training.evaluate_every_steps:
        return training, None
    path = Path(config.data.validation_path or Path(config.data.path) / "validation")
    return training, _current_store(path, "data.validation_path")


def _current_store(path: Path, setting: str) -> TokenStore:
    store = _open_store(path, setting)
    if store.is_current():
        return store
    _open_store.cache_clear()
    return _open_store(path, setting)


@functools.cache
def _open_store(path: Path, setting: str) -> TokenStore:
    return TokenStore(path, setting=setting)


def data_identity(config: JobConfig, store: TokenStore) -> Mapping[str, str]:
    """Return what makes two token stores the same to a run that resumes."""
    checksums = "".join(shard.xxh3_128 for shard in store.index.shards)
    return {
        "tokens": str(store.tokens),
        "shards": hashlib.sha256(checksums.encode()).hexdigest(),
        "tokenizer": store.index.tokenizer_sha256,
    }


def _check_world(config: JobConfig) -> tuple[int, int]:
    rank, world_size = int(os.environ.get("RANK", "0")), int(os.environ.get("WORLD_SIZE", "1"))
    if world_size != config.job.world_size:
        raise ConfigError.of(
            "WORLD_SIZE",
            world_size,
            f"the recipe says {config.job.nodes} nodes x {config.job.ranks_per_node} ranks = "
            f"{config.job.world_size}",
            "start it with `python -m training launch RECIPE` (or torchrun with as many ranks), "
            "or change [job] in the recipe",
        )
    return rank, world_size


def _check_timeouts(config: JobConfig, device: torch.device) -> None:
    if config.recovery.in_process:
        problems = list(check_timeouts(config.recovery, cuda=device.type == "cuda"))
        if problems:
            raise ConfigError(problems)


def main(argv: list[str]) -> int:
    """Run `training run RECIPE [--run-dir DIR]`."""
    parser = argparse.ArgumentParser(prog="training run", description="Be one training rank.")
    parser.add_argument("recipe", type=Path)
    parser.add_argument("--run-dir", type=Path, help="default: runs/<job.name>")
    arguments = parser.parse_args(argv)
    config = load_recipe(arguments.recipe)
    run_dir = arguments.run_dir or default_run_directory(config)
    make_run_directory(run_dir)
    limit = config.recovery.maximum_same_step_failures
    with counted_before_first_attempt(run_dir, rank=rank_and_world()[0], maximum=limit):
        worker = Worker(config, run_dir)
    return worker.run()
