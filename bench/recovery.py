"""From a fault to the first new step: Holdfast, torchrun and plain NVRx, in one run.

    python -m training prepare
    python -m bench.recovery --output recovery.jsonl
    python -m bench.recovery --device cuda --recipe training/recipes/rehearsal_gpu.toml    (Holdfast alone)

Two simulated nodes of one rank each, and a spare where a node is lost. The peers train a model of the same
size by a stock FSDP script that saves a DCP checkpoint every 10 steps; their launchers are process 1 of a pod
that is started again at once.
"control store" kills what holds the rendezvous: ours is a process of its own, theirs the first launcher.
"""

from __future__ import annotations

import argparse
import json
import math
import re
import signal
import sys
import tempfile
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from bench.recovering import ours, peers
from training.config import load_recipe
from training.errors import EXIT_STOPPED, ConfigError, HoldfastError
from training.processes import adopt_orphans, end_descendants
from training.rehearsal.isolation import Isolation, isolation
from training.schema import suggest

FAULTS = ("worker", "launcher", "node with spare", "control store")
# Seconds that issue 5 allows on two CPU cores.
BARS = {"worker": 3.0, "launcher": 4.0, "node with spare": 6.0}
LIMIT_SECONDS = 120.0

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return 1 if a bar of ours is missed, or a fault has left a trace."""
    try:
        return _measure_all(_parse(argv))
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code


def _measure_all(arguments: argparse.Namespace) -> int:
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_STOPPED))
    rows: list[Row] = []
    with tempfile.TemporaryDirectory(prefix="hf-", dir=arguments.directory) as root, isolation() as kind:
        try:
            for row in _rows(arguments, Path(root), kind):
                _record(row, arguments.output)
                rows.append(row)
        finally:
            end_descendants()
    print(table(rows))  # noqa: T201
    return 1 if arguments.device == "cpu" and any(misses(row) for row in rows) else 0


def _rows(arguments: argparse.Namespace, root: Path, kind: Isolation) -> Iterator[Row]:
    on_cpu = arguments.device == "cpu"
    for fault in arguments.faults.split(",") if on_cpu else ["worker"]:
        yield _measure_ours(fault, arguments, root)
        for name in arguments.peers.split(",") if on_cpu and arguments.peers else []:
            yield _measure_peer(name, fault, root, kind)


def table(rows: Sequence[Row]) -> str:
    """Return the rows as Markdown: seconds, ratio to ours, and our phases."""
    lines = [
        "| fault | system | s to first new step | x ours | steps lost | phases |",
        "|---|---|---|---|---|---|",
    ]
    ours_of = {row["fault"]: row["seconds"] for row in rows if row["system"] == "Holdfast"}
    for row in rows:
        seconds, base = row["seconds"], ours_of.get(row["fault"])
        shown = f"{seconds:.2f}" if seconds is not None else f"none in {LIMIT_SECONDS:g} s"
        ratio = f"{seconds / base:.1f}" if seconds is not None and base else "-"
        phases = ", ".join(
            f"{name} {span:.2f}" for name, span in row.get("phases", {}).items() if span >= 0.01
        )
        lost = row.get("steps_lost", "-")
        lines.append(f"| {row['fault']} | {row['system']} | {shown} | {ratio} | {lost} | {phases} |")
    lines += [
        f"\nWithout its store, Holdfast did {row['steps_without_store']} steps before launchers re-formed."
        for row in rows
        if "steps_without_store" in row
    ]
    return "\n".join(lines)


def _measure_ours(fault: str, arguments: argparse.Namespace, root: Path) -> Row:
    recipe = root / "recipe.toml"
    text = arguments.recipe.read_text()
    if arguments.device == "cpu":
        text = _with_spares(text, int(fault == "node with spare"))
    recipe.write_text(text)
    rank = 0 if arguments.device == "cuda" else 1
    setting = ours.Setting(recipe=recipe, directory=root / "ours", step=arguments.step, rank=rank)
    return ours.measure(fault, setting)


def _with_spares(text: str, spares: int) -> str:
    return re.sub(r"^spares = \d+$", f"spares = {spares}", text, flags=re.MULTILINE)


def _measure_peer(name: str, fault: str, root: Path, kind: Isolation) -> Row:
    directory = root / f"{name}-{fault}".replace(" ", "-")
    peer = peers.Peer(launcher=name, directory=directory, isolation=kind)
    with peers.running(peer, spares=int(fault == "node with spare")):
        hit = peers.hit(peer, fault)
        done = peer.wait_for_step(after=hit, step=1, limit_seconds=LIMIT_SECONDS)
    return {"system": name, "fault": fault, "seconds": round(done - hit, 3) if done else None}


def misses(row: Mapping[str, Any]) -> bool:
    """Say whether a row of ours took longer than it may, or ended with another state."""
    if row["system"] != "Holdfast":
        return False
    bar = BARS.get(row["fault"], math.inf)
    return not row["passed"] or row["seconds"] is None or row["seconds"] > bar


def _record(row: Row, output: Path | None) -> None:
    line = json.dumps(row)
    print(line, flush=True)  # noqa: T201
    if output:
        with output.open("a") as file:
            file.write(line + "\n")


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(prog="bench.recovery", description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=["cpu", "cuda"], default="cpu")
    parser.add_argument("--recipe", type=Path, default=Path("training/recipes/soak_cpu.toml"))
    parser.add_argument("--faults", default=",".join(FAULTS), help="default: %(default)s")
    parser.add_argument("--peers", default=",".join(peers.LAUNCHERS), help="default: %(default)s")
    parser.add_argument("--step", type=int, default=25, help="step that is hit; default: %(default)s")
    parser.add_argument("--directory", type=Path, help="for runs; default: the temporary directory")
    parser.add_argument("--output", type=Path, help="file that takes the rows as JSON lines")
    arguments = parser.parse_args(argv)
    load_recipe(arguments.recipe)  # refused before anything is measured
    _check_names("--faults", arguments.faults, FAULTS)
    if arguments.peers:
        _check_names("--peers", arguments.peers, peers.LAUNCHERS)
    if arguments.directory and not arguments.directory.is_dir():
        raise ConfigError.of("--directory", str(arguments.directory), "is no directory", "make it")
    if arguments.output and not arguments.output.parent.is_dir():
        raise ConfigError.of("--output", str(arguments.output), "lies in no directory", "make its directory")
    return arguments


def _check_names(option: str, value: str, known: Iterable[str]) -> None:
    for name in value.split(","):
        if name not in known:
            raise ConfigError.of(option, name, "unknown", suggest(name, list(known)))


if __name__ == "__main__":
    sys.exit(main())
