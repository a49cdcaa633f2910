"""The status of a run, for people."""

from __future__ import annotations

import time
from collections.abc import Iterator, Sequence

from k8s import trainer
from k8s.progress import RunStatus
from k8s.report import PodStatus, Report
from k8s.text_table import duration, table

_HEADINGS = ("INDEX", "NODE", "ROLE", "RANKS", "PHASE", "RESTARTS", "REASON")


def render_status(report: Report, *, now: float) -> str:
    """Return the report as text.

    Args:
        report: What is known.
        now: Seconds since the epoch.
    """
    lines = [f"run {report.run}   {_job(report)}   {time.strftime('%H:%M:%S', time.localtime(now))}"]
    if report.failure:
        lines.append(f"failed: {report.failure}")
    if report.training is not None:
        lines.extend(_training(report.training, now=now))
    elif report.component == trainer.COMPONENT:
        lines.append("no event yet: ranks have not reached training")
    if report.pods:
        roles = [_nodes(report.pods)] if report.component == trainer.COMPONENT else []
        lines.extend(["", *roles, *table(_HEADINGS, [_row(pod) for pod in report.pods])])
    return "\n".join(lines)


def _job(report: Report) -> str:
    return f"Job {report.job}: {report.state}" if report.job else report.state


def _training(status: RunStatus, *, now: float) -> Iterator[str]:
    speed = f"{status.tokens_per_second:,.0f} tokens/s" if status.tokens_per_second else "- tokens/s"
    eta = f"ETA {duration(status.eta_seconds)}" if status.eta_seconds else "ETA -"
    step = f"step {status.step}/{status.steps} ({100 * status.step / status.steps:.1f}%)"
    age = f"({duration(max(0.0, now - status.updated))} ago)" if status.updated else ""
    yield f"{step}   loss {_figure(status.loss)}   {speed}   {eta}   {age}"
    goodput = "-" if status.goodput_percent is None else f"{status.goodput_percent:.1f}%"
    yield (
        f"goodput {goodput}   durable step {_step(status.durable_step)}   "
        f"RAM step {_step(status.memory_step)}   evaluation loss {_figure(status.evaluation_loss)}"
    )
    problems = {"failed saves": status.failed_saves, "updates left out": status.skipped_updates}
    if any(problems.values()):
        yield "problems: " + ", ".join(f"{name} {count}" for name, count in problems.items() if count)
    restarts = status.restarts
    causes = ", ".join(f"{name} {count}" for name, count in restarts.causes.items())
    yield (
        f"restarts: in-process {restarts.in_process}, in-job {restarts.in_job}, "
        f"launcher {restarts.launcher}, pod {restarts.pod}" + (f"   causes: {causes}" if causes else "")
    )


def _nodes(pods: Sequence[PodStatus]) -> str:
    roles = [pod.role for pod in pods]
    return f"nodes: {roles.count('training')} training, {roles.count('spare')} spare, {len(pods)} in all"


def _row(pod: PodStatus) -> tuple[str, ...]:
    node = f"{pod.node} (not ready)" if pod.node_ready is False else pod.node or "-"
    ranks = f"{pod.ranks[0]}-{pod.ranks[-1]}" if pod.ranks else "-"
    return str(pod.index), node, pod.role or "-", ranks, pod.phase, str(pod.restarts), pod.reason


def _figure(value: float | None) -> str:
    return "-" if value is None else f"{value:.4f}"


def _step(value: int | None) -> str:
    return "-" if value is None else str(value)
