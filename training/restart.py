"""The in-process restart layer, and the sections by which the in-job layer notices a hang.

    fault                                layer
    exception, NCCL error, soft hang     NVRx `inprocess.Wrapper`, here: the process survives
    process death, hard hang             `ft_launcher` (training/launch.py): the ranks are respawned

A rank that dies makes the Wrapper leave in all other ranks (`min_world_size` is the whole world), so
that the in-job layer, which can bring it back, takes over.
"""

from __future__ import annotations

import logging
import os
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass, field, replace
from datetime import timedelta
from pathlib import Path
from typing import Any, Literal

import torch
from torch._C._distributed_c10d import PrefixStore, TCPStore

from training import environment
from training.config import JobConfig, RecoveryConfig
from training.errors import EXIT_RETRY, ConfigError, HoldfastError, RunError
from training.events import EventLog
from training.failures import Breaker
from training.process_group import (
    close_group,
    connect_store,
    generation,
    open_group,
    open_mesh,
    rank_and_world,
)

__all__ = ["Attempt", "RankMonitor", "close_group", "open_group", "open_mesh", "run_restartable"]

Section = Literal["setup", "step", "checkpoint"]

POLL_SECONDS = 0.1
LAST_CALL_SECONDS = 0.1
TERMINATION_GRACE_SECONDS = 5.0
# In-process restarts in a row without a step before the in-job layer is asked for new processes.
FRUITLESS_ATTEMPTS = 2

log = logging.getLogger(__name__)


class RankMonitor:
    """Tells `ft_launcher`'s rank monitor which section of the work this rank is in.

    Outside of `ft_launcher` nothing watches the rank, and it says so once.
    """

    def __init__(self) -> None:
        self._client: Any = None
        self._present = "FT_RANK_MONITOR_IPC_SOCKET" in os.environ
        if not self._present:
            log.warning("no ft_launcher: hangs of this rank are not noticed by the in-job layer")

    @contextmanager
    def section(self, name: Section) -> Iterator[None]:
        """Mark a block that has a time limit of its own. Sections may follow, but not hold, each other.

        NVRx's monitor judges several open sections by the last one only. Each attempt begins with
        "setup", on a new connection: the in-process layer interrupts a rank anywhere, a half-written
        message included, and the monitor can't read on after that.
        """
        if not self._present:
            yield
            return
        if name == "setup":
            self._connect()
        self._client.start_section(name)
        try:
            yield
        finally:
            self._client.end_section(name)

    def _connect(self) -> None:
        from nvidia_resiliency_ext.fault_tolerance import RankMonitorClient

        if self._client is not None:
            self._client.shutdown_workload_monitoring()
        self._client = RankMonitorClient()
        self._client.init_workload_monitoring()


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One call of the training function."""

    iteration: int = 0
    """In-process restarts of this process before this call."""
    ping: Callable[[], None] = field(default=lambda: None)
    """Report progress. From the first call on, silence for the soft timeout counts as a hang: call it
    after the first step, which may compile."""
    count_failure: Callable[[str, str, int], None] = field(default=lambda kind, message, step: None)
    """Count a failure of a step (kind, message, step) that the attempt itself recovers from.

    Raises SameStepError when it was the last that is allowed."""
    unwatched: Callable[[], AbstractContextManager[None]] = field(default=nullcontext)
    """Context of a block that may take longer than the hang limits, such as the last checkpoint."""


def run_restartable(
    train: Callable[[Attempt], None],
    *,
    config: JobConfig,
    run_dir: Path,
    events: EventLog,
    device: torch.device,
) -> None:
    """Call `train` until it returns, again in the same process after each fault if the recipe says so.

    Args:
        train: The training function. It emits `restored` and `step` events.
        config: The recipe.
        run_dir: Directory of the run, where failures are counted.
        events: The log that `train` emits to.
        device: Device of this rank.

    Raises:
        SameStepError: `train` raised the same exception in the same step too often.
        ConfigError: The in-process layer is on and NVRx is not installed.
        HoldfastError: As raised by `train`; such an error is not retried in the process.
    """
    limit = config.recovery.maximum_same_step_failures
    breaker = Breaker(run_dir, rank=rank_and_world()[0], maximum=limit, log=events.path)
    guarded = _Guarded(train, events, breaker)
    if not config.recovery.in_process:
        guarded(Attempt())
        return
    with _wrapped(config.recovery, device=device) as call:
        try:
            call(_Attempts(guarded, call, events), (), {})
        except _Unretried as end:
            raise end.error from None
        except _restart_abort() as end:
            log.warning("the in-process layer gives way to the in-job layer: %s", end)
            raise SystemExit(EXIT_RETRY) from None


class _Unretried(BaseException):
    """Carries an error out of the Wrapper, which restarts on every Exception."""

    def __init__(self, error: HoldfastError) -> None:
        super().__init__(str(error))
        self.error = error


class _Attempts:
    """The function that the Wrapper calls again and again."""

    def __init__(self, train: Callable[[Attempt], None], call: Any, events: EventLog) -> None:
        self._train, self._call, self._events = train, call, events
        self._pings = 0
        self._fruitless = -1

    def __call__(self) -> None:
        iteration = int(self._call.iteration)
        # the trainer pings after each step, so one ping proves that a step was done
        self._fruitless = 0 if self._pings > 0 else self._fruitless + 1
        self._pings = 0
        if self._fruitless >= FRUITLESS_ATTEMPTS:
            raise _Unretried(
                RunError(f"{self._fruitless} in-process restarts in a row did not finish a step")
            )
        if iteration:
            self._events.update(iteration=iteration)
            self._events.emit("reentry")
        current = Attempt(iteration=iteration, ping=self._ping, unwatched=self._call.disable_hang_protection)
        try:
            self._train(current)
        except HoldfastError as error:
            raise _Unretried(error) from None

    def _ping(self) -> None:
        self._pings += 1
        self._call.ping()


class _Guarded:
    """The training function with its exceptions recorded and counted."""

    def __init__(self, train: Callable[[Attempt], None], events: EventLog, breaker: Breaker) -> None:
        self._train, self._events, self._breaker = train, events, breaker

    def __call__(self, attempt: Attempt) -> None:
        def ping() -> None:
            self._breaker.succeeded(self._events.last_step)
            attempt.ping()

        self._events.last_step = None
        try:
            self._train(replace(attempt, ping=ping, count_failure=self._breaker.count))
        except Exception as error:
            last = self._events.last_step
            step = None if last is None else last + 1
            notes = getattr(error, "__notes__", [])
            self._events.emit(
                "exception", type=type(error).__name__, message=str(error)[:500], step=step, notes=notes
            )
            self._breaker.failed(error, step=step)
            raise


@contextmanager
def _wrapped(recovery: RecoveryConfig, *, device: torch.device) -> Iterator[Any]:
    """Yield NVRx's CallWrapper on the control store."""
    inprocess = _import_inprocess()
    from training.wrapper_store import ControlStore

    # While the third value lives, so does the store that this rank may have to host
    host, port, _hosted = _wrapper_endpoint()
    with _without_gpu_checks(device):
        wrapper = inprocess.Wrapper(
            store_factory=ControlStore,
            store_kwargs={"host": host, "port": port, "prefix": f"{generation()}/wrapper"},
            initialize=inprocess.initialize.RetryController(min_world_size=rank_and_world()[1]),
            abort=inprocess.abort.AbortTorchDistributed(),
            health_check=inprocess.health_check.CudaHealthCheck() if device.type == "cuda" else None,
            monitor_thread_interval=_seconds(POLL_SECONDS),
            monitor_process_interval=_seconds(POLL_SECONDS),
            progress_watchdog_interval=_seconds(POLL_SECONDS),
            heartbeat_interval=_seconds(1.0),
            heartbeat_timeout=_seconds(min(30.0, recovery.barrier_timeout_seconds / 2)),
            soft_timeout=_seconds(recovery.soft_timeout_seconds),
            hard_timeout=_seconds(recovery.hard_timeout_seconds),
            barrier_timeout=_seconds(recovery.barrier_timeout_seconds),
            completion_timeout=_seconds(recovery.barrier_timeout_seconds),
            last_call_wait=_seconds(LAST_CALL_SECONDS),
            termination_grace_time=_seconds(TERMINATION_GRACE_SECONDS),
        )
    with inprocess.wrap.CallWrapper(wrapper) as call:
        yield call


@contextmanager
def _without_gpu_checks(device: torch.device) -> Iterator[None]:
    """Hide LOCAL_RANK on CPU: where it is set, NVRx adds GPU, NVLink and NIC checks, which fail there."""
    if device.type == "cuda" or "LOCAL_RANK" not in os.environ:
        yield
        return
    local_rank = os.environ.pop("LOCAL_RANK")
    try:
        yield
    finally:
        os.environ["LOCAL_RANK"] = local_rank


def _import_inprocess() -> Any:
    try:
        from nvidia_resiliency_ext import inprocess
    except ImportError as error:
        rule = f"needs nvidia-resiliency-ext, which cannot be imported ({error})"
        fix = 'install it, or set recovery.layers = "none"'
        raise ConfigError.of("recovery.layers", None, rule, fix) from error
    return inprocess


def _restart_abort() -> type[BaseException]:
    from nvidia_resiliency_ext.inprocess.exception import RestartAbort

    return RestartAbort  # type: ignore[no-any-return]


def _wrapper_endpoint() -> tuple[str, int, TCPStore | None]:
    """Return host and port of the Wrapper's store, and the store if this rank has to host it."""
    endpoint = environment.control_endpoint()
    if endpoint is not None:
        return *endpoint, None
    rank, _ = rank_and_world()
    os.environ.setdefault("RANK", "0")
    os.environ.setdefault("WORLD_SIZE", "1")
    shared = PrefixStore(f"{generation()}/wrapper_store", connect_store())
    hosted = None
    if rank == 0:
        log.warning("no control store: rank 0 hosts the in-process layer's, and its loss ends the job")
        hosted = TCPStore("0.0.0.0", 0, is_master=True, wait_for_workers=False)
        shared.set("endpoint", f"{os.environ.get('MASTER_ADDR', '127.0.0.1')}:{hosted.port}")
    host, port = environment.parse_endpoint(shared.get("endpoint").decode())
    return host, port, hosted


def _seconds(value: float) -> timedelta:
    return timedelta(seconds=value)
