"""Run a function on several ranks: real processes, real gloo groups, quick to start.

A fork server that has imported torch and transformers once makes a rank in 0.1 s instead of 5 s. Their
checkpoint workers are forked as well, as under `training launch`.
"""

from __future__ import annotations

import atexit
import multiprocessing
import os
import signal
import tempfile
import time
import traceback
from collections.abc import Callable
from multiprocessing.connection import Connection, wait
from multiprocessing.process import BaseProcess
from pathlib import Path
from typing import Any

from training.environment import SHARED_MEMORY, free_port

_context = multiprocessing.get_context("forkserver")
_context.set_forkserver_preload(["tests.preload"])


class RankFailed(AssertionError):
    """A rank raised; the message is its traceback."""


class Ranks:
    """Ranks of one world, started and not yet awaited."""

    def __init__(self, world_size: int, function: Callable[..., Any], *arguments: Any) -> None:
        port = free_port()
        self._directory = tempfile.TemporaryDirectory(prefix="ranks-", dir="/tmp")
        self.processes: list[BaseProcess] = []
        self._results: list[Connection] = []
        # multiprocessing would wait at the end for ranks that a failed test has left running
        atexit.register(self.kill)
        for rank in range(world_size):
            receiver, sender = _context.Pipe(duplex=False)
            environment = _environment(rank, world_size, port) | {"TMPDIR": self._directory.name}
            process = _context.Process(target=_run, args=(sender, environment, function, arguments))
            process.start()
            sender.close()
            self.processes.append(process)
            self._results.append(receiver)

    def wait(self, timeout_seconds: float = 90.0) -> list[Any]:
        """Return what each rank returned."""
        deadline = time.monotonic() + timeout_seconds
        values: list[Any] = []
        try:
            for rank, (process, receiver) in enumerate(zip(self.processes, self._results, strict=True)):
                values.append(_result(rank, process, receiver, deadline))
        finally:
            self.kill()
        return values

    def kill(self) -> None:
        """SIGKILL whatever still runs, and reap it."""
        for process in self.processes:
            if process.is_alive() and process.pid is not None:
                os.kill(process.pid, signal.SIGKILL)
        for process in self.processes:
            process.join()
        self._directory.cleanup()


def run_ranks(
    world_size: int, function: Callable[..., Any], *arguments: Any, timeout_seconds: float = 90.0
) -> list[Any]:
    """Run `function(*arguments)` on every rank and return the results in order of rank."""
    return Ranks(world_size, function, *arguments).wait(timeout_seconds)


def _environment(rank: int, world_size: int, port: int) -> dict[str, str]:
    return {
        "RANK": str(rank),
        "LOCAL_RANK": str(rank),
        "WORLD_SIZE": str(world_size),
        "MASTER_ADDR": "127.0.0.1",
        "MASTER_PORT": str(port),
        "OMP_NUM_THREADS": "1",
        "HF_HUB_OFFLINE": "1",
        # the fork server has that of the test that started it
        SHARED_MEMORY: os.environ[SHARED_MEMORY],
    }


def _run(
    sender: Connection, environment: dict[str, str], function: Callable[..., Any], arguments: Any
) -> None:
    os.environ.update(environment)
    tempfile.tempdir = None  # asked for before, by the fork server
    from training import writer_server

    writer_server.start()
    try:
        sender.send((True, function(*arguments)))
    except BaseException:
        sender.send((False, traceback.format_exc()))
        raise


def _result(rank: int, process: BaseProcess, receiver: Connection, deadline: float) -> Any:
    remaining = max(deadline - time.monotonic(), 0.0)
    if receiver not in wait([receiver, process.sentinel], remaining) and not receiver.poll():
        raise RankFailed(f"rank {rank}: no result (exit code {process.exitcode})")
    try:
        succeeded, value = receiver.recv()
    except EOFError:
        process.join(5)
        raise RankFailed(f"rank {rank}: died with exit code {process.exitcode}") from None
    if not succeeded:
        raise RankFailed(f"rank {rank}:\n{value}")
    return value


def is_alive(pid: int) -> bool:
    """Say whether a process is there and no zombie: an orphan's is reaped whenever its new parent likes."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] != "Z"
    except (FileNotFoundError, ProcessLookupError):
        return False
