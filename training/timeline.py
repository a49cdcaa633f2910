"""From the event logs of many ranks to one line of time.

    attempt      one rank between its start (or re-entry) and its end
    generation   the attempts that met in one rendezvous

Training is synchronous, so a job is as far as its last rank. The line of time follows, in each generation,
the *critical* attempt: the one that came to the rendezvous last, for which all others waited. It is one
real process, so its spans don't overlap.
"""

from __future__ import annotations

import itertools
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from training.fault_config import DONE_POINTS, HARMLESS, SETUP_POINTS

Event = Mapping[str, Any]

STEP = "step"
LOST = "lost work"
RENDEZVOUS = "rendezvous"


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    """A span of one attempt."""

    name: str
    start: float
    end: float
    step: int | None = None


@dataclass(frozen=True, kw_only=True, slots=True)
class Attempt:
    """One rank between its start and its end."""

    process: tuple[str, int, int]
    """Node, pid, and which process of that pid: a node that is made again counts from 1 again."""
    rank: int
    key: tuple[int, int]
    """(round, iteration): equal for all ranks of a generation."""
    began: float
    """When the kernel made the process, or when it entered the training function again."""
    intervals: tuple[Interval, ...]
    restoration: Event | None
    """The event of the state being loaded; None if nothing was loaded."""
    faults: tuple[Event, ...]
    exceptions: tuple[Event, ...]

    @property
    def restored(self) -> int | None:
        """Step of the state that was loaded; None if nothing was loaded."""
        return int(self.restoration["step"]) if self.restoration else None

    @property
    def first_step(self) -> Interval | None:
        return next((i for i in self.intervals if i.name == STEP), None)

    @property
    def rendezvous(self) -> Interval | None:
        """The rendezvous that this attempt took part in, if it got through."""
        return next((i for i in self.intervals if i.name == RENDEZVOUS), None)


@dataclass(frozen=True, kw_only=True, slots=True)
class Generation:
    """Attempts that trained together."""

    attempts: tuple[Attempt, ...]

    @property
    def critical(self) -> Attempt:
        return max(self.attempts, key=_rendezvous_start)

    @property
    def began_to_train(self) -> float:
        """When the last rank left the rendezvous."""
        return max(i.end for a in self.attempts for i in a.intervals if i.name == RENDEZVOUS)

    @property
    def finished_steps(self) -> set[int]:
        """Optimizer steps that were done, those whose line a fault took away included."""
        steps = {i.step for a in self.attempts for i in a.intervals if i.step and i.name == STEP}
        for fault in self.faults:
            if fault.get("point") in SETUP_POINTS:
                continue
            last = int(fault["step"]) - (fault.get("point") not in DONE_POINTS)
            steps.update(range((self.base or 0) + 1, last + 1))
        return {step for step in steps if step is not None}

    @property
    def base(self) -> int | None:
        """Step that this generation started from; None if it got neither a state nor a step."""
        restored = [a.restored for a in self.attempts if a.restored is not None]
        first = [i.step for a in self.attempts for i in a.intervals if i.step and i.name == STEP]
        if restored:
            return max(restored)
        return min(first) - 1 if first else None

    @property
    def faults(self) -> list[Event]:
        return sorted((f for a in self.attempts for f in a.faults), key=_time)

    @property
    def cause(self) -> Event | None:
        """The planned fault that ended it, if one did."""
        return next((fault for fault in self.faults if fault["kind"] not in HARMLESS), None)

    @property
    def exceptions(self) -> list[Event]:
        return sorted((e for a in self.attempts for e in a.exceptions), key=_time)

    @property
    def processes(self) -> set[tuple[str, int, int]]:
        return {attempt.process for attempt in self.attempts}


def generations(events: Iterable[Event]) -> list[Generation]:
    """Return the generations of a run in order.

    Attempts that died before they got through a rendezvous belong to none.
    """
    met = [attempt for attempt in attempts(events) if attempt.rendezvous]
    groups: list[list[Attempt]] = []
    for attempt in sorted(met, key=_rendezvous_end):
        if not groups or not _fits(groups[-1], attempt):
            groups.append([])
        groups[-1].append(attempt)
    return [Generation(attempts=tuple(group)) for group in groups]


def surviving_limits(line: Sequence[Generation]) -> list[float]:
    """Return for each generation the last step that no later one took back."""
    limits: list[float] = []
    limit = float("inf")
    for generation in reversed(line):
        limits.append(limit)
        if generation.base is not None:
            limit = min(limit, generation.base)
    return limits[::-1]


def _fits(group: Sequence[Attempt], attempt: Attempt) -> bool:
    # Rounds start at 0 again when the control store is lost; a rank that comes twice tells these apart.
    ranks = {member.rank for member in group}
    return group[0].key == attempt.key and attempt.rank not in ranks


def attempts(events: Iterable[Event]) -> Iterator[Attempt]:
    """Yield every attempt of every rank, by its first event."""
    grouped: dict[tuple[tuple[str, int, int], int], list[Event]] = {}
    entered: Counter[tuple[str, int]] = Counter()
    for event in events:
        if event.get("role") == "rank":
            place = (str(event["node"]), int(event["pid"]))
            entered[place] += event["event"] == "enter"
            grouped.setdefault(((*place, entered[place]), int(event["iteration"])), []).append(event)
    for (process, iteration), own in grouped.items():
        yield Attempt(
            process=process,
            rank=int(own[0]["rank"]),
            key=(int(own[0]["round"]), iteration),
            began=min(_beginning(event) for event in own),
            intervals=_intervals(own),
            restoration=_restoration(own),
            faults=tuple(e for e in own if e["event"] == "fault"),
            exceptions=tuple(e for e in own if e["event"] == "exception"),
        )


def _restoration(events: Sequence[Event]) -> Event | None:
    """Return the restore that an attempt began with; one that goes back before a NaN restores again later."""
    first = min((float(event["time"]) for event in events if event["event"] == STEP), default=float("inf"))
    restores = (e for e in events if e["event"] == "restored" and e["time"] < first)
    return next(restores, None)


def _beginning(event: Event) -> float:
    return float(event.get("born", event.get("start", event["time"])))


def _intervals(events: Sequence[Event]) -> tuple[Interval, ...]:
    """Return an attempt's spans in order, each cut where the next one starts."""
    spans = sorted((_interval(event) for event in events if _is_span(event)), key=lambda i: i.start)
    spans = [replace(span, name=LOST) if _is_undone(span, events) else span for span in spans]
    limits = itertools.chain((following.start for following in spans[1:]), [float("inf")])
    return tuple(
        replace(span, end=limit) if span.end > limit else span
        for span, limit in zip(spans, limits, strict=False)
    )


def _is_undone(span: Interval, events: Sequence[Event]) -> bool:
    """Say whether the attempt itself went back before this step, as it does after a NaN."""
    restores = (event for event in events if event["event"] == "restored" and event["time"] > span.start)
    return span.name == STEP and any((span.step or 0) > event["step"] for event in restores)


def _is_span(event: Event) -> bool:
    return event["event"] in ("span", STEP) and not event.get("failed")


def _interval(event: Event) -> Interval:
    start = float(event["start"])
    return Interval(
        name=str(event.get("name", STEP)),
        start=start,
        end=start + float(event["seconds"]),
        step=event.get("step"),
    )


def _rendezvous_start(attempt: Attempt) -> float:
    assert attempt.rendezvous is not None
    return attempt.rendezvous.start


def _rendezvous_end(attempt: Attempt) -> float:
    assert attempt.rendezvous is not None
    return attempt.rendezvous.end


def _time(event: Event) -> float:
    return float(event["time"])
