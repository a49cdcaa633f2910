"""One HTML page over a rehearsal: verdict, timeline, and every fault by phase. It loads nothing."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from html import escape
from pathlib import Path

from training.config import JobConfig
from training.events import read_events
from training.goodput import Goodput, ledger
from training.rehearsal.chart import css_class, draw, lanes
from training.rehearsal.verdict import FaultOutcome, Verdict
from training.timeline import Event

PAGE = "timeline.html"
COLOURS = {
    "productive": "#2f9e6e",
    "lost work": "#e07a3f",
    "detect": "#e5484d",
    "stop": "#f08c99",
    "restart": "#a1795b",
    "idle": "#9aa3ad",
    "imports": "#8b7be0",
    "layers": "#c0a5f2",
    "rendezvous": "#3f83f0",
    "build": "#16a5a5",
    "load": "#d8a51d",
    "verify": "#f0cf63",
    "first step": "#7fd8ae",
    "save": "#5b6b80",
    "evaluate": "#8fa6bd",
    "finalize": "#3f4b5c",
}
_STYLE = Path(__file__).with_name("page.css")


def write_page(run_dir: Path, config: JobConfig, verdict: Verdict) -> Path:
    """Write the page into a rehearsal's directory and return its path."""
    path = run_dir / PAGE
    path.write_text(render(config, verdict, read_events(run_dir / "disturbed")), encoding="utf-8")
    return path


def render(config: JobConfig, verdict: Verdict, events: Sequence[Event]) -> str:
    """Return the page.

    Args:
        config: The recipe.
        verdict: What became of it.
        events: Those of the disturbed run.
    """
    account = ledger(events)
    name = escape(config.job.name)
    shape = f"{config.job.nodes} nodes x {config.job.ranks_per_node} ranks, {config.training.steps} steps"
    return "\n".join(
        [
            "<!DOCTYPE html>",
            '<html lang="en"><head><meta charset="utf-8"/>',
            '<meta name="viewport" content="width=device-width, initial-scale=1"/>',
            f"<title>Rehearsal of {name}</title><style>{_STYLE.read_text()}{_colours()}</style></head><body>",
            f'<h1>{name}: <span class="{_mood(verdict.passed)}">{_outcome(verdict)}</span></h1>',
            f'<div class="soft">{shape} &#183; {len(verdict.faults)} planned faults</div>',
            f'<div class="cards">{"".join(_cards(verdict, account))}</div>',
            f'<h2>Timeline</h2><div class="panel">{_timeline(verdict, events, account)}{_legend()}</div>',
            f'<h2>Faults</h2><div class="panel">{_fault_table(verdict.faults)}</div>',
            f'<h2>Verdict</h2><div class="panel"><code>{escape(verdict.line())}</code></div>',
            "</body></html>",
            "",
        ]
    )


def fault_words(fault: FaultOutcome) -> str:
    """Return what a fault was, for people."""
    return f"{fault.kind} in rank {fault.rank}, step {fault.step}, {fault.point}"


def _outcome(verdict: Verdict) -> str:
    return "survived without a trace" if verdict.passed else "FAILED"


def _cards(verdict: Verdict, account: Goodput) -> Iterator[str]:
    all_back = verdict.recovered == len(verdict.faults)
    yield _card("faults recovered", f"{verdict.recovered}/{len(verdict.faults)}", _mood(all_back))
    yield _card("steps lost", str(verdict.steps_lost), "")
    yield _card("every loss equal", "yes" if verdict.identical_loss else "no", _mood(verdict.identical_loss))
    yield _card(
        "final state equal", "yes" if verdict.identical_params else "no", _mood(verdict.identical_params)
    )
    slowest = max((restart.seconds for restart in account.restarts), default=0.0)
    yield _card("slowest recovery", f"{slowest:.1f} s", "")
    yield _card("goodput", f"{verdict.goodput_percent:.1f}%", "")
    yield _card("wall time", f"{account.wall_seconds:.0f} s", "")


def _card(what: str, value: str, mood: str) -> str:
    return f'<div class="card"><b class="{mood}">{value}</b><span>{what}</span></div>'


def _timeline(verdict: Verdict, events: Sequence[Event], account: Goodput) -> str:
    hits = {event["index"]: float(event["time"]) for event in events if event["event"] == "fault"}
    marks = [(hits[fault.index], fault_words(fault)) for fault in verdict.faults if fault.index in hits]
    begin = min(float(event.get("born", event["time"])) for event in events)
    end = max(float(event["time"]) for event in events)
    return draw(lanes(events, account), sorted(marks), begin=begin, end=end)


def _legend() -> str:
    items = (f'<span><i class="{css_class(name)}"></i>{name}</span>' for name in COLOURS)
    return f'<div class="legend">{"".join(items)}<span>✕ a process died</span></div>'


def _fault_table(faults: Sequence[FaultOutcome]) -> str:
    head = "".join(
        f"<th>{name}</th>" for name in ("fault", "by layer", "state", "lost", "phases", "seconds", "proof")
    )
    return f"<table><tr>{head}</tr>{''.join(map(_fault_row, faults))}</table>"


def _fault_row(fault: FaultOutcome) -> str:
    mood = _mood(fault.recovered)
    state = "recovered" if fault.recovered else "not recovered" if fault.evidence else "not delivered"
    cells = [
        f"<td>{escape(fault_words(fault))}<br/><span class='{mood}'>{state}</span></td>",
        f"<td>{fault.layer or '-'}</td><td>{fault.source or '-'}</td>",
        f"<td class='number'>{fault.steps_lost}</td><td>{_phase_bar(fault)}</td>",
        f"<td class='number'>{fault.seconds:.2f}</td><td class='soft'>{escape(fault.evidence) or '-'}</td>",
    ]
    return f"<tr>{''.join(cells)}</tr>"


def _phase_bar(fault: FaultOutcome) -> str:
    total = fault.seconds or 1.0
    pieces = (
        f'<div class="{css_class(name)}" style="width:{100 * seconds / total:.2f}%" '
        f'title="{name} {seconds:.2f} s"></div>'
        for name, seconds in fault.phases.items()
        if seconds > 0
    )
    return f'<div class="phases">{"".join(pieces)}</div>'


def _colours() -> str:
    return "\n".join(
        f".{css_class(name)} {{ fill: {colour}; background: {colour}; }}" for name, colour in COLOURS.items()
    )


def _mood(is_good: bool) -> str:
    return "good" if is_good else "bad"
