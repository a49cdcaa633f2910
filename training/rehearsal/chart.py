"""The timeline of a run as an SVG drawing: a lane for recoveries, and one for each rank on each node."""

from __future__ import annotations

import itertools
from collections import defaultdict
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from training.goodput import Goodput
from training.timeline import STEP, Attempt, Event, Interval, attempts, generations, surviving_limits

WIDTH, LABEL_WIDTH, LANE_HEIGHT, LANE_GAP, TOP = 1200.0, 118.0, 22.0, 8.0, 34.0
_AXIS_HEIGHT = 34.0
_NARROW = 2.0
# Steps follow each other with less than this between them where nothing else happens.
_SEAMLESS_SECONDS = 0.05


@dataclass(frozen=True, kw_only=True, slots=True)
class Bar:
    """A coloured span on a lane."""

    kind: str
    """Part or phase: the class of its colour."""
    start: float
    end: float
    title: str


@dataclass(frozen=True, kw_only=True, slots=True)
class Lane:
    """One line of the drawing."""

    label: str
    bars: tuple[Bar, ...]
    deaths: tuple[tuple[float, str], ...] = ()
    """When a process of it ended without being stopped, and how."""


def lanes(events: Sequence[Event], account: Goodput) -> list[Lane]:
    """Return the lane of recoveries and those of its ranks, by node."""
    by_place: dict[tuple[str, int], list[Bar]] = defaultdict(list)
    limits = _limits(events)
    for attempt in attempts(events):
        limit = limits.get((attempt.process, attempt.key[1]), float("inf"))
        by_place[attempt.process[0], attempt.rank] += _attempt_bars(attempt, limit)
    ranks = [
        Lane(label=f"{node} rank {rank}", bars=tuple(bars), deaths=_deaths(events, node, rank))
        for (node, rank), bars in sorted(by_place.items())
    ]
    return [Lane(label="recovery", bars=tuple(_job_bars(account))), *ranks]


def draw(drawn: Sequence[Lane], faults: Sequence[tuple[float, str]], *, begin: float, end: float) -> str:
    """Return the drawing.

    Args:
        drawn: Lanes from top to bottom.
        faults: Time and words of each fault that hit, in the order of their numbers.
        begin: Time at the left edge, in seconds since the epoch.
        end: Time at the right edge.
    """
    scale = _Scale(begin=begin, end=max(end, begin + 1.0))
    height = TOP + len(drawn) * (LANE_HEIGHT + LANE_GAP)
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH:g} {height + _AXIS_HEIGHT:g}" '
        'role="img" aria-label="timeline">'
    ]
    parts += _axis(scale, height)
    for number, lane in enumerate(drawn):
        parts += _lane(lane, scale, TOP + number * (LANE_HEIGHT + LANE_GAP))
    parts += _fault_marks(faults, scale, height)
    return "\n".join([*parts, "</svg>"])


@dataclass(frozen=True, kw_only=True, slots=True)
class _Scale:
    begin: float
    end: float

    def x(self, time: float) -> float:
        share = (min(max(time, self.begin), self.end) - self.begin) / (self.end - self.begin)
        return LABEL_WIDTH + share * (WIDTH - LABEL_WIDTH - 12)


def _limits(events: Sequence[Event]) -> dict[tuple[Any, int], float]:
    line = generations(events)
    return {
        (attempt.process, attempt.key[1]): limit
        for generation, limit in zip(line, surviving_limits(line), strict=True)
        for attempt in generation.attempts
    }


def _attempt_bars(attempt: Attempt, limit: float) -> Iterator[Bar]:
    for interval in attempt.intervals:
        is_lost = interval.name == STEP and (interval.step or 0) > limit
        kind = ("lost work" if is_lost else "productive") if interval.name == STEP else interval.name
        yield Bar(kind=kind, start=interval.start, end=interval.end, title=_interval_title(interval, kind))


def _interval_title(interval: Interval, kind: str) -> str:
    what = f"step {interval.step}" if interval.name == STEP else interval.name
    again = ", done again later" if kind == "lost work" else ""
    return f"{what}: {interval.end - interval.start:.2f} s{again}"


def _job_bars(account: Goodput) -> Iterator[Bar]:
    for restart in account.restarts:
        reached = restart.began
        for name, seconds in restart.phases.items():
            if seconds > 0:
                title = f"{restart.fault or 'unplanned'}, {restart.layer}: {name} {seconds:.2f} s"
                yield Bar(kind=name, start=reached, end=reached + seconds, title=title)
                reached += seconds


def _deaths(events: Iterable[Event], node: str, rank: int) -> tuple[tuple[float, str], ...]:
    return tuple(
        (float(event["time"]), f"signal {event['signal']}" if event["signal"] else f"{event['exit_code']}")
        for event in events
        if event["event"] == "worker_exit"
        and not event["stopped"]
        and (event["node"], event["rank"]) == (node, rank)
        and (event["signal"] or event.get("exit_code"))
    )


def _lane(lane: Lane, scale: _Scale, y: float) -> Iterator[str]:
    middle = y + LANE_HEIGHT / 2
    width = WIDTH - LABEL_WIDTH - 12
    yield f'<text class="label" x="0" y="{middle + 4:g}">{escape(lane.label)}</text>'
    box = f'x="{LABEL_WIDTH:g}" y="{y:g}" width="{width:g}" height="{LANE_HEIGHT:g}"'
    yield f'<rect class="lane" {box} rx="4"/>'
    for bar in _joined(lane.bars, scale):
        left, right = scale.x(bar.start), scale.x(bar.end)
        yield (
            f'<rect class="{css_class(bar.kind)}" x="{left:.2f}" y="{y + 2:g}" '
            f'width="{max(right - left, 0.6):.2f}" height="{LANE_HEIGHT - 4:g}">'
            f"<title>{escape(bar.title)}</title></rect>"
        )
    for time, how in lane.deaths:
        yield (
            f'<text class="death" x="{scale.x(time):.2f}" y="{middle + 5:g}">✕'
            f"<title>{escape(lane.label)} ended: {escape(how)}</title></text>"
        )


def _joined(bars: Sequence[Bar], scale: _Scale) -> Iterator[Bar]:
    """Yield bars with those too narrow to see joined to their like."""
    held: Bar | None = None
    for bar in sorted(bars, key=lambda bar: bar.start):
        narrow = scale.x(bar.end) - scale.x(bar.start) < _NARROW
        if held and narrow and held.kind == bar.kind and bar.start - held.end < _SEAMLESS_SECONDS:
            title = f"{held.title.partition(' to ')[0]} to {bar.title}"
            held = Bar(kind=bar.kind, start=held.start, end=bar.end, title=title)
            continue
        if held:
            yield held
        held = bar
    if held:
        yield held


def _axis(scale: _Scale, bottom: float) -> Iterator[str]:
    seconds = scale.end - scale.begin
    every = next(step for step in _round_steps() if seconds / step <= 12)
    for number in range(int(seconds / every) + 1):
        x = scale.x(scale.begin + number * every)
        yield f'<line class="grid" x1="{x:.2f}" x2="{x:.2f}" y1="{TOP - 6:g}" y2="{bottom:g}"/>'
        yield f'<text class="tick" x="{x:.2f}" y="{bottom + 16:g}">{number * every:g} s</text>'


def _round_steps() -> Iterator[float]:
    for power in itertools.count(-1):
        yield from (digit * 10.0**power for digit in (1, 2, 5))


def _fault_marks(faults: Sequence[tuple[float, str]], scale: _Scale, bottom: float) -> Iterator[str]:
    taken = -100.0
    for number, (time, words) in enumerate(faults, start=1):
        x = scale.x(time)
        badge = max(x, taken + 19)  # badges stand beside each other, lines where they are
        taken = badge
        yield (
            f'<g class="fault"><title>{number}. {escape(words)}</title>'
            f'<line x1="{x:.2f}" x2="{x:.2f}" y1="24" y2="{bottom:g}"/>'
            f'<line x1="{badge:.2f}" x2="{x:.2f}" y1="18" y2="24"/>'
            f'<circle cx="{badge:.2f}" cy="11" r="9"/>'
            f'<text x="{badge:.2f}" y="15">{number}</text></g>'
        )


def css_class(kind: str) -> str:
    """Return the class that colours a part or phase."""
    return "p-" + kind.replace(" ", "-")
