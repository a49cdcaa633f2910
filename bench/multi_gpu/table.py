"""The tables of docs/benchmarks.md, from the rows of a run."""

from __future__ import annotations

import statistics
from collections.abc import Iterable, Iterator, Mapping, Sequence
from datetime import UTC, datetime
from typing import Any

from bench.multi_gpu.results import Row, newest


def render(rows: Iterable[Row]) -> str:
    """Return all tables as Markdown."""
    found = newest(rows)
    parts = (_machine, _speed, _host_copies, _contention, _recovery, _verdict, _endurance, _durable, _peer)
    return "\n\n".join("\n".join(lines) for part in parts if (lines := list(part(found))))


def _machine(rows: Sequence[Row]) -> Iterator[str]:
    if not rows:
        return
    machine = rows[-1]["machine"]
    day = datetime.fromtimestamp(max(row["time"] for row in rows), UTC).date()
    yield (
        f"{machine['gpus']} x {machine['gpu']} of one host, driver {machine['driver']}, "
        f"{machine['cores']} cores, {machine['numa_nodes']} NUMA node(s), "
        f"torch {machine['torch']}, NCCL {machine['nccl']}, {day}."
    )


def _speed(rows: Sequence[Row]) -> Iterator[str]:
    speed = _of(rows, "speed")
    if not speed:
        return
    yield from _head("Training speed")
    yield from _columns(
        "model, samples x tokens a GPU",
        "GPUs",
        "resilience",
        "step ms",
        "tokens/s a GPU",
        "MFU %",
        "scaling",
        "cost",
    )
    groups: dict[tuple[str, int, str], list[Row]] = {}
    for row in sorted(speed, key=lambda row: (row["workload"], row["ranks"], row["window"] != "nothing")):
        groups.setdefault((row["workload"], row["ranks"], row["window"]), []).append(row)
    steps = {key: statistics.mean(row["step_ms"] for row in group) for key, group in groups.items()}
    for (workload, ranks, window), group in groups.items():
        off, alone = steps.get((workload, ranks, "nothing")), steps.get((workload, 1, "nothing"))
        step = steps[workload, ranks, window]
        yield _line(
            workload,
            ranks,
            "off" if window == "nothing" else window,
            f"{step:.1f}",
            f"{statistics.mean(row['tokens_per_second_per_gpu'] for row in group):,.0f}",
            f"{statistics.mean(row.get('mfu_percent', 0.0) for row in group):.1f}",
            f"{alone / step:.1%}" if alone and ranks > 1 and window == "nothing" else "",
            f"{step / off - 1:+.2%}" if off and window != "nothing" else "",
        )


def _host_copies(rows: Sequence[Row]) -> Iterator[str]:
    copies = _of(rows, "host_copies")
    if not copies:
        return
    yield from _head("Copies between GPUs and page-locked memory")
    yield from _columns("what", "one GPU alone, GB/s", "all at once, GB/s each", "in all, GB/s")
    for row in copies:
        for name in ("allocate", "lock_first", "lock_again"):
            if f"{name}_gbps" in row:
                rate = row[f"{name}_gbps"]
                yield _line(f"slot: {name.replace('_', ' ')}", "", _numbers(rate), f"{sum(rate):.1f}")
        if "together_gbps" in row:
            together = row["together_gbps"]
            alone = _numbers(row.get("alone_gbps", ()))
            yield _line(row["what"], alone, _numbers(together), f"{sum(together):.1f}")


def _contention(rows: Sequence[Row]) -> Iterator[str]:
    contention = _of(rows, "contention")
    if not contention:
        return
    yield from _head("A snapshot at every step, by the length of forward and backward")
    yield from _columns(
        "GPUs at once",
        "state a GPU, GB",
        "copy ms",
        "forward + backward ms",
        "step ms",
        "with snapshot ms",
        "cost ms",
    )
    for row in contention:
        yield _line(
            row["ranks"],
            row["state_gb_per_rank"],
            row["copy_ms"],
            row["forward_backward_ms"],
            row["step_ms"],
            row["step_with_snapshot_ms"],
            f"{row['step_with_snapshot_ms'] - row['step_ms']:.1f}",
        )


def _recovery(rows: Sequence[Row]) -> Iterator[str]:
    recovery = _of(rows, "recovery")
    if not recovery:
        return
    yield from _head("Recovery over NCCL: fault to first new step")
    yield from _columns(
        "tree",
        "fault",
        "rank",
        "layer",
        "state from",
        "steps lost",
        "s to the state",
        "s to a new step",
        "phases, s",
    )
    for row in recovery:
        yield _line(
            row.get("tree", ""),
            f"{row['kind']} ({row['point']})",
            row["rank"],
            row["layer"] if row["recovered"] else "**not recovered**",
            row["restored_from"] or "none",
            row["steps_lost"],
            row["state_loaded_seconds"],
            row["new_step_seconds"],
            _phases(row["phases"]),
        )


def _verdict(rows: Sequence[Row]) -> Iterator[str]:
    verdicts = _of(rows, "verdict")
    if not verdicts:
        return
    yield from _head("Verdict: deterministic kernels, against the same steps undisturbed")
    yield from _columns(
        "model",
        "nodes x ranks",
        "fault",
        "layer",
        "state from",
        "steps lost",
        "s to a new step",
        "loss equal",
        "state equal",
    )
    for row in verdicts:
        yield _line(
            row["model"],
            f"{row['nodes']} x {row['ranks'] // row['nodes']}",
            row["kind"],
            row["layer"] if row["recovered"] else "**not recovered**",
            row["restored_from"] or "none",
            row["steps_lost"],
            row["new_step_seconds"],
            _answer(row["identical_loss"]),
            _answer(row["identical_params"]),
        )


def _endurance(rows: Sequence[Row]) -> Iterator[str]:
    for row in _of(rows, "endurance"):
        samples: Mapping[str, Mapping[str, list[float]]] = row["samples"]
        names = list(next(iter(samples.values()), {}))
        yield from _head(f"{max(samples, key=int)} in-process restarts in a row, each rank")
        yield from _columns("restarts", *(name.replace("_", " ") for name in names))
        numbers = [
            number
            for number in samples
            if number in ("0", "1", "2", "5", "10", "15") or number == max(samples, key=int)
        ]
        for number in numbers:
            yield _line(number, *(_numbers(samples[number].get(name, ())) for name in names))


def _durable(rows: Sequence[Row]) -> Iterator[str]:
    durable = _of(rows, "durable")
    if not durable:
        return
    yield from _head("Durable save, resumed at another number of GPUs")
    yield from _columns(
        "GPUs",
        "state, GB",
        "resumed at step",
        "verify s",
        "load s",
        "load GB/s",
        "save call ms",
        "drain s",
        "drain GB/s",
    )
    for row in durable:
        phases = row.get("restore_phases", {})
        yield _line(
            row["ranks"],
            row["state_gb"],
            row.get("resumed_at", ""),
            phases.get("verify", ""),
            phases.get("load", ""),
            row.get("load_gbps", ""),
            row.get("save_call_ms", ""),
            row.get("drain_seconds", ""),
            row.get("drain_gbps", ""),
        )


def _peer(rows: Sequence[Row]) -> Iterator[str]:
    peer = _of(rows, "peer_copies")
    if not peer:
        return
    yield from _head("From GPU to GPU")
    yield from _columns("what", "GB", "GB/s", "ms a GB")
    for row in peer:
        yield _line(row["what"], row.get("gb", ""), row.get("gbps", ""), row.get("ms_per_gb", ""))


def _of(rows: Sequence[Row], section: str) -> list[Row]:
    return [row for row in rows if row["section"] == section]


def _head(title: str) -> Iterator[str]:
    yield f"### {title}"
    yield ""


def _columns(*names: str) -> Iterator[str]:
    yield _line(*names)
    yield "|" + "---|" * len(names)


def _line(*values: Any) -> str:
    return "| " + " | ".join(str(value) for value in values) + " |"


def _numbers(values: Iterable[float]) -> str:
    return ", ".join(f"{value:g}" for value in values)


def _answer(value: bool | None) -> str:
    return "not compared" if value is None else "yes" if value else "**no**"


def _phases(phases: Mapping[str, float]) -> str:
    return ", ".join(f"{name} {seconds:.2f}" for name, seconds in phases.items() if seconds >= 0.005)
