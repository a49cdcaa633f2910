"""`training launch`: one node's process 1. It supervises `ft_launcher` and says how the run ended.

    exit  meaning                                               a Kubernetes Job should
    0     the run's last step is durable (RUN_DIR/DONE)         count the index as succeeded
    1     this node cannot go on; another might                 make the pod again
    64    a setting is wrong                                    fail
    65    the same step fails again and again                   fail
    143   it was told to stop                                   make the pod again

A launcher that dies is replaced in place, so that the pod, and what is in its memory, survives. NVRx's
launcher alone exits 0 on SIGTERM, which would complete the index of a run that is not done.
"""

from __future__ import annotations

import argparse
import contextlib
import logging
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from types import FrameType

from training import environment, shared_memory, slot_owners
from training.agent import EXIT_CONTROL_RETURNED
from training.config import JobConfig, load_recipe
from training.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY, EXIT_STOPPED
from training.events import EventLog
from training.fork_server import ForkedProcess, ForkServer, ForkServerLost
from training.launcher_arguments import launcher_arguments, node_place, worker_command
from training.nvrx_version import check_version
from training.processes import adopt_orphans, end_descendants, reap_orphans
from training.run_directory import default_run_directory, make_run_directory
from training.stop_notice import StopNotice

POLL_SECONDS = 0.05
# A launcher that outlives the run by this much waits for a round that will not come.
LATE_LAUNCHER_SECONDS = 30.0
# The grace is as long as a save takes. A run that has failed, or is done, has nothing to save.
IDLE_GRACE_SECONDS = 30.0
RESTART_BUDGET = 20.0
RESTART_REFILL_SECONDS = 600.0
QUICK_DEATH_SECONDS = 5.0
# Ends of a control store that a restart does not mend.
CONTROL_FINAL_CODES = (EXIT_RETRY, EXIT_CONFIG)
RESTART_PAUSE_SECONDS = 1.0

log = logging.getLogger(__name__)

Launcher = subprocess.Popen[bytes] | ForkedProcess


def main(arguments: list[str]) -> int:
    """Run `training launch`."""
    parser = argparse.ArgumentParser(prog="training launch", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path, help="TOML file")
    parser.add_argument("--run-dir", type=Path, help="directory of the run; default: runs/NAME")
    args = parser.parse_args(arguments)
    config = load_recipe(args.recipe)
    run_dir = args.run_dir or default_run_directory(config)
    return launch(config, recipe=args.recipe, run_dir=run_dir)


def launch(config: JobConfig, *, recipe: Path, run_dir: Path, worker: Sequence[str] | None = None) -> int:
    """Run this node's share of the run to its end and return the exit code.

    Args:
        config: The recipe.
        recipe: Its file, for the workers.
        run_dir: Directory of the run.
        worker: Command of one rank; default: `training run`.

    Raises:
        ConfigError: The environment does not fit the recipe, or NVRx is not the one we know.
    """
    check_version()
    adopt_orphans()
    make_run_directory(run_dir)
    grace = environment.grace_seconds()
    with _private_directory() as private, _control(config, recipe, run_dir) as control:
        place = node_place(config, control=environment.control_endpoint() or control.endpoint)
        arguments = launcher_arguments(
            config,
            place=place,
            stop_seconds=environment.stop_seconds(),
            worker=list(worker or worker_command(recipe, run_dir)),
        )
        supervisor = Supervisor(
            launchers=LauncherSource(
                recipe,
                arguments=["run", str(run_dir), str(recipe), *arguments],
                environ=_launcher_environ(private, place.index, place.control),
            ),
            run_dir=run_dir,
            exit_file=private / "exit",
            grace_seconds=grace,
            restarts=config.recovery.in_job,
            control=control,
        )
        return supervisor.run()


class RestartBudget:
    """Restarts that are left; they come back with time."""

    def __init__(self, *, capacity: float, refill_seconds: float, now: float) -> None:
        self._capacity, self._refill_seconds = capacity, refill_seconds
        self._left, self._since = capacity, now

    def take(self, now: float) -> bool:
        """Take one restart; False if none is left."""
        self._left = min(self._capacity, self._left + (now - self._since) / self._refill_seconds)
        self._since = now
        if self._left < 1:
            return False
        self._left -= 1
        return True


@dataclass(kw_only=True, slots=True)
class ControlChild:
    """The control store of a run on one node, where nobody else has started one."""

    command: list[str] | None
    endpoint: tuple[str, int] | None
    process: subprocess.Popen[bytes] | None = None
    _not_before: float = 0.0

    def ensure(self) -> None:
        """Start it, or start it again, unless it has ended for good."""
        if self.command is None or self.final_code is not None:
            return
        now = time.monotonic()
        if now >= self._not_before and (self.process is None or self.process.poll() is not None):
            self._not_before = now + RESTART_PAUSE_SECONDS
            self.process = subprocess.Popen(self.command, start_new_session=True)

    @property
    def final_code(self) -> int | None:
        """Exit code of a store that would only end with it again."""
        code = self.process.poll() if self.process else None
        return code if code in CONTROL_FINAL_CODES else None

    @property
    def pids(self) -> list[int]:
        return [self.process.pid] if self.process else []


class LauncherSource:
    """Starts launchers: copies of a warm process, or programs of their own where that is off or gone."""

    def __init__(self, recipe: Path, *, arguments: Sequence[str], environ: dict[str, str]) -> None:
        self._recipe, self._arguments, self._environ = recipe, list(arguments), environ
        self._server: ForkServer | None = None

    def start(self) -> Launcher:
        if environment.warm_workers():
            for _ in range(2):  # a server that was lost is made once more
                try:
                    self._server = self._server or self._start_server()
                    return self._server.spawn(self._arguments, self._environ)
                except ForkServerLost as error:
                    log.warning("fork server lost (%s): the next start takes seconds to import", error)
                    self._server = None
        command = [sys.executable, "-m", "training.agent", *self._arguments]
        return subprocess.Popen(command, env=self._environ, start_new_session=True)

    def check(self) -> None:
        """Reap a fork server that has died; the next start makes another."""
        if self._server is not None and self._server.has_ended():
            log.warning("the fork server has died: the next start takes seconds to import")
            self._server = None

    @property
    def pids(self) -> list[int]:
        return [self._server.pid] if self._server else []

    def _start_server(self) -> ForkServer:
        command = [sys.executable, "-m", "training.agent", "serve", str(self._recipe)]
        return ForkServer.start(command, environ=self._environ)


class Supervisor:
    """Keeps one launcher alive until the run ends, the budget is gone, or it is told to stop."""

    def __init__(
        self,
        *,
        launchers: LauncherSource,
        run_dir: Path,
        exit_file: Path,
        grace_seconds: float,
        restarts: bool,
        control: ControlChild,
    ) -> None:
        self._launchers, self._control = launchers, control
        self._done_file, self._exit_file = run_dir / "DONE", exit_file
        self._grace_seconds, self._restarts = grace_seconds, restarts
        self._budget = RestartBudget(
            capacity=RESTART_BUDGET, refill_seconds=RESTART_REFILL_SECONDS, now=time.monotonic()
        )
        self._events = EventLog(run_dir, role="supervisor", node=environment.node_name())
        self._told_to_stop = False
        self._notice = StopNotice.from_environment()
        self._stop_by: float | None = None
        self._done_since: float | None = None

    def run(self) -> int:
        """Supervise and return the exit code."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        code = self._supervise()
        self._events.emit("exit", exit_code=code)
        self._events.close()
        return code

    def _supervise(self) -> int:
        attempt = 0
        while not self._told_to_stop and not self._done_file.exists():
            started = time.monotonic()
            self._events.emit("launch", attempt=attempt)
            ended = self._run_launcher()
            end_descendants(keep=[*self._control.pids, *self._launchers.pids])
            shared_memory.sweep()
            code = self._final_code(ended)
            if code is not None:
                return code
            if time.monotonic() - started < QUICK_DEATH_SECONDS:
                time.sleep(RESTART_PAUSE_SECONDS)
            attempt += 1
        return EXIT_STOPPED if self._told_to_stop else EXIT_DONE

    def _run_launcher(self) -> int:
        """Run one launcher and return how it ended: its exit code, or minus the signal."""
        self._control.ensure()
        process = self._launchers.start()
        while (code := process.poll()) is None:
            self._control.ensure()
            self._launchers.check()
            reap_orphans(keep=[process.pid, *self._control.pids, *self._launchers.pids])
            self._stop_if_due(process)
            time.sleep(POLL_SECONDS)
        self._events.emit("launcher_exit", exit_code=max(code, 0), signal=-code if code < 0 else None)
        return code

    def _stop_if_due(self, process: Launcher) -> None:
        now = time.monotonic()
        self._told_to_stop |= self._notice.is_due(time.time())
        if self._done_file.exists():
            self._done_since = self._done_since or now
        late = self._done_since is not None and now - self._done_since > LATE_LAUNCHER_SECONDS
        final = self._exit_file.exists() or self._control.final_code is not None
        if self._stop_by is None and (self._told_to_stop or final or late):
            grace = self._grace_seconds
            self._stop_by = now + (grace if self._told_to_stop else min(grace, IDLE_GRACE_SECONDS))
            process.send_signal(signal.SIGTERM)
        if self._stop_by is not None and now > self._stop_by:
            process.kill()

    def _final_code(self, ended: int) -> int | None:
        """Return this node's exit code, or None to start another launcher."""
        if self._exit_file.exists():
            return int(self._exit_file.read_text())
        if self._done_file.exists():
            return EXIT_DONE
        if self._told_to_stop:
            return EXIT_STOPPED
        if self._control.final_code is not None:
            log.error("the control store of this node ended with %d", self._control.final_code)
            return self._control.final_code
        if ended == -signal.SIGALRM:
            log.warning("the control store did not answer this node's launcher, starting another")
        if ended in (EXIT_CONTROL_RETURNED, -signal.SIGALRM):
            return None
        if not self._restarts:
            log.error('a rank or the launcher ended, and recovery.layers has no "in_job" to restart it')
            return EXIT_RETRY
        if not self._budget.take(time.monotonic()):
            log.error("launcher ended with %d; no restarts are left on this node", ended)
            return EXIT_RETRY
        log.warning("launcher ended with %d before the run was done, starting another", ended)
        return None

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._told_to_stop = True


@contextmanager
def _private_directory() -> Iterator[Path]:
    """Yield a directory for sockets and marks of this node's processes, and remove it."""
    base = environment.short_temporary_directory()
    directory = Path(tempfile.mkdtemp(prefix="hf-", dir=base))
    keeper = slot_owners.keep()
    try:
        yield directory
    finally:
        end_descendants()
        keeper.unlink(missing_ok=True)
        shared_memory.sweep()
        shutil.rmtree(directory, ignore_errors=True)


@contextmanager
def _control(config: JobConfig, recipe: Path, run_dir: Path) -> Iterator[ControlChild]:
    """Yield a control store of our own where one node trains alone and none is given."""
    if environment.control_endpoint() is not None or config.job.launchers > 1:
        yield ControlChild(command=None, endpoint=None)
        return
    endpoint = ("127.0.0.1", environment.free_port())
    options = ["--host", endpoint[0], "--port", str(endpoint[1]), "--linger-seconds", "0"]
    command = [sys.executable, "-m", "training", "control", str(recipe), *options]
    control = ControlChild(command=command, endpoint=endpoint)
    try:
        yield control
    finally:
        if control.process is not None:
            control.process.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                control.process.wait(RESTART_PAUSE_SECONDS)


def _launcher_environ(private: Path, index: int, control: tuple[str, int]) -> dict[str, str]:
    caches = Path(tempfile.gettempdir()) / f"torchinductor_{os.getuid()}"
    return {
        # torch warns, with a stack, for every poll of a store that times out
        "TORCH_CPP_LOG_LEVEL": "ERROR",
        "TORCHINDUCTOR_CACHE_DIR": str(caches),
        "OMP_NUM_THREADS": "1",
        # is_available() by NVML: a fork server that has touched CUDA makes ranks that can't
        "PYTORCH_NVML_BASED_CUDA_CHECK": "1",
        **os.environ,
        environment.CONTROL: f"{control[0]}:{control[1]}",
        environment.EXIT_FILE: str(private / "exit"),
        environment.ROUND_FILE: str(private / "round"),
        "GROUP_RANK": str(index),
        "TMPDIR": str(private),
    }
