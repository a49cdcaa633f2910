"""All measurements, in the order in which they are worth their time."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

from bench.multi_gpu import durable, endurance, recovery, training_speed
from bench.multi_gpu.recipes import Workload
from bench.multi_gpu.recovery import RecoveryCase, fault
from bench.multi_gpu.runs import BenchmarkError, Settings
from bench.multi_gpu.training_speed import SpeedCase

_RANKS_LIMIT_SECONDS = 150.0
_TINY = Workload(model="tiny", sequence_length_tokens=32, samples_per_rank=2)
_RECOVERY = Workload(model="1b", sequence_length_tokens=8192, samples_per_rank=1)
_TIMED = Workload(model="1b", sequence_length_tokens=8192, samples_per_rank=2)
_VERDICT = Workload(model="155m", sequence_length_tokens=4096, samples_per_rank=2)


@dataclass(frozen=True, kw_only=True, slots=True)
class Measurement:
    """Something that is measured in one go."""

    name: str
    section: str
    seconds: float
    """About how long it takes: it is not begun with less time left."""
    measure: Callable[[Settings], Sequence[dict[str, Any]]]


def measurements(settings: Settings) -> Iterator[Measurement]:
    """Yield all measurements of this machine."""
    yield _ranks_measurement("copies", ["host_copies", "peer_copies", "contention"], settings)
    for case in speed_cases(settings):
        yield Measurement(
            name=case.name,
            section="speed",
            seconds=90.0 if case.resilient else 60.0,
            measure=partial(training_speed.measure, case),
        )
    yield from _recovery_measurements(settings)


def _recovery_measurements(settings: Settings) -> Iterator[Measurement]:
    for case in verdict_cases(settings):
        measure = partial(recovery.measure_verdict, case)
        yield Measurement(name=case.name, section="verdict", seconds=110.0, measure=measure)
    timed = timed_case(settings)
    measure = partial(recovery.measure_times, timed)
    yield Measurement(name=timed.name, section="recovery", seconds=150.0, measure=measure)
    workload = _TINY if settings.tiny else _RECOVERY
    restarts = 3 if settings.tiny else 20
    yield Measurement(
        name=f"{restarts} restarts x{settings.gpus}",
        section="endurance",
        seconds=100.0,
        measure=lambda found: endurance.measure(workload, found, restarts=restarts),
    )
    yield Measurement(
        name=f"durable x{settings.gpus}",
        section="durable",
        seconds=120.0,
        measure=lambda found: durable.measure(workload, found, save_every_steps=4 if found.tiny else 10),
    )


def timed_case(settings: Settings) -> RecoveryCase:
    """Return the run whose recoveries are timed. The steps between let it page-lock its slots again."""
    last = settings.gpus - 1
    first, gap = (6, 8) if settings.tiny else (30, 14)
    kinds = (
        ("exception", last, "backward"),
        ("hang", last, "forward"),
        ("sigkill", last, "before_optimizer"),
        ("sigkill", 0, "backward"),
        ("launcher_kill", last, "backward"),
    )
    return RecoveryCase(
        name=f"recovery times x{settings.gpus}",
        workload=_TINY if settings.tiny else _TIMED,
        steps=100_000,
        faults=tuple(
            fault(kind, rank=rank, step=first + gap * number, point=point)
            for number, (kind, rank, point) in enumerate(kinds)
        ),
    )


def verdict_cases(settings: Settings) -> Iterator[RecoveryCase]:
    """Yield the rehearsals; most faults hit the last rank, which is not the coordinator."""
    workload = _TINY if settings.tiny else _VERDICT
    last = settings.gpus - 1
    first, gap = (8, 6) if settings.tiny else (60, 20)
    kinds = (
        ("exception", last, "backward"),
        ("hang", last, "forward"),
        ("sigkill", last, "before_optimizer"),
        ("launcher_kill", last, "backward"),
        ("control_loss", 0, "backward"),
    )
    yield RecoveryCase(
        name=f"verdict x{settings.gpus}",
        workload=workload,
        steps=60 if settings.tiny else 260,
        faults=tuple(
            fault(kind, rank=rank, step=first + gap * number, point=point)
            for number, (kind, rank, point) in enumerate(kinds)
        ),
    )
    if settings.gpus > 1:
        yield RecoveryCase(
            name=f"node loss x{settings.gpus}",
            workload=workload,
            steps=30,
            nodes=settings.gpus,
            spares=1,
            save_every_steps=8,
            faults=(fault("node_loss", rank=last, step=19),),
        )


def speed_cases(settings: Settings) -> Iterator[SpeedCase]:
    """Yield what section 1 runs: every workload at 1, 2, 4, ... ranks, off and on."""
    if settings.tiny:
        for resilient in (False, True):
            yield SpeedCase(
                workload=_TINY,
                ranks=settings.gpus,
                resilient=resilient,
                warm_up_steps=2,
                window_steps=4,
                save_step=10,
                longest_step_seconds=5.0,
            )
        return
    small = Workload(model="1b", sequence_length_tokens=8192, samples_per_rank=4)
    large = Workload(model="8b", sequence_length_tokens=8192, samples_per_rank=2)
    largest = settings.gpus
    for ranks in reversed(_rank_counts(settings)):
        for resilient in (False, True):
            # the more slots a rank page-locks, the later snapshots begin
            save_step = 72 if ranks > 1 else 100
            yield SpeedCase(workload=small, ranks=ranks, resilient=resilient, save_step=save_step)
    if largest > 1:
        yield SpeedCase(
            workload=large,
            ranks=largest,
            resilient=False,
            warm_up_steps=4,
            window_steps=8,
            longest_step_seconds=4.0,
        )
    yield SpeedCase(workload=small, ranks=largest, resilient=False, repetition=1)
    quarter = Workload(model="8b/8", sequence_length_tokens=8192, samples_per_rank=4)
    for ranks in reversed(_rank_counts(settings)):
        yield SpeedCase(
            workload=quarter, ranks=ranks, resilient=False, window_steps=20, longest_step_seconds=2.0
        )


def _rank_counts(settings: Settings) -> list[int]:
    return [count for count in (1, 2, 4, 8) if count <= settings.gpus]


def _ranks_measurement(name: str, parts: Sequence[str], settings: Settings) -> Measurement:
    return Measurement(
        name=f"{name} x{settings.gpus}",
        section="copies",
        seconds=100.0,
        measure=partial(_run_ranks, name, parts),
    )


def _run_ranks(name: str, parts: Sequence[str], settings: Settings) -> list[dict[str, Any]]:
    """Run `bench.multi_gpu.ranks` on all GPUs; rows that were written before a failure are kept."""
    output = settings.directory / f"{name}.jsonl"
    output.parent.mkdir(parents=True, exist_ok=True)
    output.unlink(missing_ok=True)
    state = ["--state-mb", "8"] if settings.tiny else []
    command = [
        *(sys.executable, "-m", "torch.distributed.run", "--standalone"),
        *(f"--nproc-per-node={settings.gpus}", "-m", "bench.multi_gpu.ranks"),
        *(str(output), *parts, *state),
    ]
    environ = dict(os.environ)
    if settings.device == "cpu":
        environ["CUDA_VISIBLE_DEVICES"] = ""
    done = subprocess.run(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=_RANKS_LIMIT_SECONDS,
        check=False,
    )
    if done.returncode != 0:
        kept = output.read_text() if output.exists() else ""
        raise BenchmarkError(f"{name}: ended with {done.returncode}\n{done.stdout[-4000:]}\n{kept}")
    return [json.loads(line) for line in output.read_text().splitlines()]
