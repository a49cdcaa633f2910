"""The readable report of a rehearsal."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

from training.rehearsal.verdict import FaultOutcome, Verdict


def report_lines(verdict: Verdict, run_dir: Path) -> Iterator[str]:
    """Yield the report; its last line is the verdict."""
    yield ""
    yield f"Rehearsal of {verdict.steps} steps, {len(verdict.faults)} planned faults"
    for fault in verdict.faults:
        yield from _fault_lines(fault)
    yield f"  every loss equals the undisturbed run's      {_tick(verdict.identical_loss)}"
    yield f"  final parameters and optimizer state equal   {_tick(verdict.identical_params)}"
    yield f"  events, logs, checkpoints                    {run_dir}"
    yield ""
    yield verdict.line()


def _fault_lines(fault: FaultOutcome) -> Iterator[str]:
    yield f"  {fault.kind} in rank {fault.rank} at step {fault.step}, {fault.point}"
    if not fault.evidence:
        yield "    NOT DELIVERED: no trace of it in the events"
        return
    yield f"    evidence   {fault.evidence}"
    if not fault.recovered:
        yield "    NOT RECOVERED"
        return
    yield f"    recovered  {fault.layer}, {fault.steps_lost} steps done again, {fault.seconds:.1f} s"
    yield "    phases     " + ", ".join(f"{name} {span:.1f}" for name, span in fault.phases.items() if span)


def _tick(value: bool) -> str:
    return "yes" if value else "NO"
