"""The fault plan of a rehearsal: what is done to whom, when, and which event proves that it was done.

    kind                what is done                                   proof, after its `fault` event
    exception           the rank raises InjectedFault                  exception, of the same pid
    hang                the rank waits for ever                        reentry, worker_exit by a signal, or
                                                                       launcher_exit, and no further step
    sigkill, sigstop    the rank gets that signal                      worker_exit of the pid by a signal
    slow                the rank sleeps `seconds` and goes on          fault_over of the pid: `seconds`
    nan                 its loss becomes NaN                           non_finite of that step: roll_back
    corrupt_snapshot    a bit of its newest snapshot flips; SIGKILL    refused: memory, `damaged_step`
    corrupt_checkpoint  a bit of the newest checkpoint flips, its      refused: durable, `damaged_path`
                        own snapshots are lost; SIGKILL
    full_disk           its next part of a checkpoint has no space     checkpoint failed, by its writer
    launcher_kill       its launcher gets SIGKILL                      launcher_exit of its node by SIGKILL
    node_loss           its node dies, memory included                 process_exit of its node by SIGKILL
    control_loss        the control store gets SIGKILL                 process_exit of `control` by SIGKILL
    sigterm             its node is told to stop (eviction)            process_exit of its node with 143

`damaged_step` and `damaged_path` are in the `fault` event. A fault that cannot be done, because there is
nothing to damage yet, leaves a `fault_missed` event instead.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Literal, get_args

from training.errors import Problem
from training.schema import Count, Seconds

if TYPE_CHECKING:
    from training.config import JobConfig

FaultKind = Literal[
    "exception",
    "hang",
    "sigkill",
    "sigstop",
    "slow",
    "nan",
    "corrupt_snapshot",
    "corrupt_checkpoint",
    "full_disk",
    "launcher_kill",
    "node_loss",
    "control_loss",
    "sigterm",
]
SetupPoint = Literal["setup", "rendezvous", "restore"]
StepPoint = Literal["forward", "backward", "before_optimizer", "after_optimizer", "save"]
FaultPoint = Literal[SetupPoint, StepPoint]

SETUP_POINTS: tuple[SetupPoint, ...] = get_args(SetupPoint)
STEP_POINTS: tuple[StepPoint, ...] = get_args(StepPoint)
# Points at which the step is done already.
DONE_POINTS = ("after_optimizer", "save")

# The ranks go on through these; after all others they are set up again.
HARMLESS = ("slow", "nan", "full_disk")
# The in-process layer alone recovers from these, and the trainer alone from NaN.
IN_PROCESS = ("exception", "hang")

_BEFORE_UPDATE = ("forward", "backward", "before_optimizer")
_POINTS_OF_KIND = {
    "nan": ("forward",),
    # at later points the newest snapshot of this rank is not yet that of all ranks
    "corrupt_snapshot": _BEFORE_UPDATE,
    "corrupt_checkpoint": STEP_POINTS,
    "full_disk": (*_BEFORE_UPDATE, "after_optimizer"),
}


@dataclass(frozen=True, kw_only=True, slots=True)
class Fault:
    """One planned fault of a rehearsal."""

    kind: FaultKind
    """What happens; see the table in training/fault_config.py."""
    rank: Count
    """Rank that it hits, or whose launcher or node; for control_loss, the rank that sets the time."""
    step: Count
    """Step during which it hits; the first is 1. At `save`: the first save begun in or after that step. At
    `setup`, `rendezvous` and `restore`: the set-up that follows another planned fault of that step, or the
    run's first set-up for 0."""
    point: FaultPoint = "backward"
    """Place in the step, or in the set-up: before the rendezvous, in it, or in the middle of the restore."""
    seconds: Seconds = 1.0
    """How long a slow rank sleeps."""

    @property
    def in_setup(self) -> bool:
        return self.point in SETUP_POINTS

    @property
    def restarts(self) -> bool:
        """Whether ranks are set up again after it."""
        return self.kind not in HARMLESS

    def problems(self) -> Iterator[Problem]:
        allowed = _POINTS_OF_KIND.get(self.kind)
        if allowed is not None and self.point not in allowed:
            rule = f"must be one of {', '.join(allowed)} for kind={self.kind!r}"
            yield Problem(path="point", value=self.point, rule=rule, fix="choose one of them")
        if self.step == 0 and not self.in_setup:
            rule = f"must be at least 1 at point={self.point!r}"
            yield Problem(path="step", value=self.step, rule=rule, fix="raise it")


@dataclass(frozen=True, kw_only=True, slots=True)
class RehearsalConfig:
    """What `training rehearse` does to the run."""

    faults: tuple[Fault, ...] = ()


def points_of(kind: FaultKind, points: Sequence[FaultPoint]) -> list[FaultPoint]:
    """Return those of the points at which a kind can hit."""
    allowed = _POINTS_OF_KIND.get(kind, (*SETUP_POINTS, *STEP_POINTS))
    return [point for point in points if point in allowed]


def causes(faults: Sequence[Fault], fault: Fault) -> list[int]:
    """Return the faults that lead to the set-up in which `fault` hits, by index in the plan."""
    return [
        index
        for index, other in enumerate(faults)
        if other.restarts and not other.in_setup and other.step == fault.step
    ]


def plan_problems(config: JobConfig) -> Iterator[Problem]:
    """Check each fault against the rest of the recipe."""
    for index, fault in enumerate(config.rehearsal.faults):
        for problem in _fault_problems(fault, config):
            yield Problem(
                path=f"rehearsal.faults[{index}].{problem.path}",
                value=problem.value,
                rule=problem.rule,
                fix=problem.fix,
            )


def _fault_problems(fault: Fault, config: JobConfig) -> Iterator[Problem]:
    if fault.rank >= config.job.world_size:
        rule = f"must be below the {config.job.world_size} ranks"
        yield Problem(path="rank", value=fault.rank, rule=rule, fix="lower it")
    if fault.step > config.training.steps:
        rule = f"must be within training.steps={config.training.steps}"
        yield Problem(path="step", value=fault.step, rule=rule, fix="lower it")
    if fault.in_setup and fault.step and not causes(config.rehearsal.faults, fault):
        rule = f"point={fault.point!r} needs another fault that restarts the ranks in this step"
        yield Problem(path="step", value=fault.step, rule=rule, fix="plan one, or use 0 for the run's start")
    yield from _layer_problems(fault, config)
    yield from _timing_problems(fault, config)


def _layer_problems(fault: Fault, config: JobConfig) -> Iterator[Problem]:
    if can_recover(fault.kind, config):
        return
    if fault.kind == "nan":
        rule = "only non_finite_loss='roll_back' ends with the undisturbed run's state"
        fix = 'set training.non_finite_loss = "roll_back"'
    else:
        rule = f"recovery.layers={config.recovery.layers!r} does not recover from it"
        fix = 'set recovery.layers = "both"'
    yield Problem(path="kind", value=fault.kind, rule=rule, fix=fix)


def can_recover(kind: FaultKind, config: JobConfig) -> bool:
    """Say whether the recipe's layers bring a run through such a fault."""
    if kind in ("slow", "full_disk"):
        return True
    if kind == "nan":
        return config.training.non_finite_loss == "roll_back"
    return config.recovery.in_job or (kind in IN_PROCESS and config.recovery.in_process)


def _timing_problems(fault: Fault, config: JobConfig) -> Iterator[Problem]:
    every_steps = config.checkpoint.every_steps
    if fault.kind == "slow" and fault.seconds >= slow_limit_seconds(config):
        rule = f"must be below {slow_limit_seconds(config):g}, the shortest limit, or it is a hang"
        yield Problem(path="seconds", value=fault.seconds, rule=rule, fix="lower it")
    if fault.kind == "corrupt_checkpoint" and fault.step <= 2 * every_steps:
        rule = f"must be above 2 x checkpoint.every_steps={every_steps}: one to damage, one to fall back on"
        yield Problem(path="step", value=fault.step, rule=rule, fix="raise it")
    if fault.kind == "corrupt_snapshot" and not 0 < snapshot_interval_steps(config) < fault.step:
        rule = "must come after a first snapshot (snapshot.every_steps)"
        yield Problem(path="step", value=fault.step, rule=rule, fix="raise it, and have snapshots taken")
    if fault.kind == "full_disk" and config.checkpoint.writer != "holdfast":
        rule = 'needs checkpoint.writer = "holdfast"'
        yield Problem(path="kind", value=fault.kind, rule=rule, fix="change one of them")
    if fault.kind == "full_disk" and fault.step > last_regular_save(config):
        rule = f"must be at most {last_regular_save(config)}: the run's last save must not fail"
        yield Problem(path="step", value=fault.step, rule=rule, fix="lower it")


def slow_limit_seconds(config: JobConfig) -> float:
    """Return how long a rank may stand still before something takes it for hanging."""
    recovery = config.recovery
    limits = [recovery.group_timeout_seconds]
    limits += [recovery.soft_timeout_seconds] if recovery.in_process else []
    limits += [recovery.step_timeout_seconds] if recovery.in_job else []
    return min(limits)


def snapshot_interval_steps(config: JobConfig) -> int:
    """Return the steps between snapshots, 1 where they are still to be measured."""
    every_steps = config.snapshot.every_steps
    return 1 if every_steps == "auto" else every_steps


def last_regular_save(config: JobConfig) -> int:
    """Return the last step before the run's end at which a checkpoint is due."""
    every_steps = config.checkpoint.every_steps
    return (config.training.steps - 1) // every_steps * every_steps
