"""The readable report of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training.goodput import PHASES
from training.rehearsal.verdict import FaultOutcome, Verdict


def report_lines(verdict: Verdict, run_dir: Path, page: Path) -> Iterator[str]:
    """Yield the report; its last line is the verdict."""
    yield ""
    yield f"Rehearsal of {verdict.steps} steps, {len(verdict.faults)} planned faults"
    for fault in verdict.faults:
        yield from _fault_lines(fault)
    yield ""
    yield from _phase_table(verdict)
    yield f"  every loss equals the undisturbed run's      {_tick(verdict.identical_loss)}"
    yield f"  final parameters and optimizer state equal   {_tick(verdict.identical_params)}"
    yield f"  events, logs, checkpoints                    {run_dir}"
    yield f"  timeline                                     {page}"
    yield ""
    yield verdict.line()


def _fault_lines(fault: FaultOutcome) -> Iterator[str]:
    yield f"  {fault.index + 1}. {fault.kind} in rank {fault.rank} at step {fault.step}, {fault.point}"
    if not fault.evidence:
        yield "     NOT DELIVERED: no trace of it in the events"
        return
    yield f"     evidence   {fault.evidence}"
    if not fault.recovered:
        yield "     NOT RECOVERED"
    elif not fault.layer:
        yield "     recovered  training went on through it"
    else:
        source = fault.source or "nothing: from step 0"
        yield f"     recovered  {fault.layer}, state from {source}, {fault.steps_lost} steps done again"


def _phase_table(verdict: Verdict) -> Iterator[str]:
    """Yield a table of seconds by phase, without the phases that no fault has."""
    healed = [fault for fault in verdict.faults if fault.phases]
    names = [name for name in PHASES if any(fault.phases.get(name, 0.0) >= 0.005 for fault in healed)]
    if not names:
        return
    widths = [max(len(name), 6) + 2 for name in names]
    yield "  seconds from the fault to the end of the first new step"
    head = "".join(f"{name:>{width}}" for name, width in zip(names, widths, strict=True))
    yield f"  {'':21}{head}   total"
    for fault in healed:
        spans = zip(names, widths, strict=True)
        row = "".join(f"{fault.phases.get(name, 0.0):>{width}.2f}" for name, width in spans)
        yield f"  {fault.index + 1:>2}. {fault.kind:17}{row}{fault.seconds:>8.2f}"
    yield ""


def _tick(value: bool) -> str:
    return "yes" if value else "NO"
