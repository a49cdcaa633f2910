"""Rehearse random faults until a number of them has hit; every failure is named with its seed.

    make soak SEED=1 FAULTS=200

Each run takes the next seed, so that one failure can be had again:

    python -m training rehearse RECIPE --random-faults N --seed S
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import EXIT_STOPPED
from training.processes import adopt_orphans, end_descendants

RECIPE = Path(__file__).parents[1] / "training" / "recipes" / "soak_cpu.toml"
FAULTS_PER_RUN = 5
_RUN_SECONDS = 900
_END_SECONDS = 60


@dataclass(frozen=True, kw_only=True, slots=True)
class Outcome:
    """What a run with random faults came to."""

    seed: int
    planned: int
    recovered: int
    passed: bool
    seconds: float
    why: str
    """What was wrong; empty where nothing was."""


def main() -> int:
    """Run the soak; return 1 if a run failed."""
    parser = argparse.ArgumentParser(prog="soak", description=__doc__.split("\n")[0])
    parser.add_argument("--recipe", type=Path, default=RECIPE)
    parser.add_argument("--seed", type=int, default=1, help="of the first run; default: %(default)s")
    parser.add_argument("--faults", type=int, default=200, help="in all; default: %(default)s")
    parser.add_argument("--run-dir", type=Path, help="default: runs/soak-TIME")
    arguments = parser.parse_args()
    if arguments.faults < 1:
        parser.error(f"--faults={arguments.faults}: must be at least 1; raise it")
    root = arguments.run_dir or Path("runs") / time.strftime("soak-%Y%m%d-%H%M%S")
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_STOPPED))
    outcomes: list[Outcome] = []
    started = time.monotonic()
    for first in range(0, arguments.faults, FAULTS_PER_RUN):
        count = min(arguments.faults - first, FAULTS_PER_RUN)
        outcomes.append(run(arguments.recipe, root, seed=arguments.seed + len(outcomes), count=count))
        minutes = (time.monotonic() - started) / 60
        left = minutes / (first + count) * (arguments.faults - first - count)
        print(f"{_line(outcomes[-1])}  {minutes:.0f} min, {left:.0f} left", flush=True)  # noqa: T201
    return report(outcomes, root)


def run(recipe: Path, root: Path, *, seed: int, count: int) -> Outcome:
    """Rehearse one random plan."""
    command = [sys.executable, "-m", "training", "rehearse", str(recipe), "--json"]
    options = ["--random-faults", str(count), "--seed", str(seed)]
    places = ["--run-dir", str(root / f"seed-{seed}"), "--undisturbed", str(root / "undisturbed")]
    started = time.monotonic()
    try:
        verdict, why = _verdict([*command, *options, *places])
    finally:
        end_descendants()
    return Outcome(
        seed=seed,
        planned=count,
        recovered=verdict["recovered"] if verdict else 0,
        passed=bool(verdict and verdict["passed"]),
        seconds=time.monotonic() - started,
        why=why or _problem(verdict),
    )


def _verdict(command: list[str]) -> tuple[dict[str, Any] | None, str]:
    """Return the verdict of a rehearsal, or what it ended with instead."""
    with subprocess.Popen(command, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as process:
        try:
            out, error = process.communicate(timeout=_RUN_SECONDS)
        except subprocess.TimeoutExpired:
            return None, f"not done after {_RUN_SECONDS} s"
        finally:
            _end(process)
    return (json.loads(out), "") if out else (None, error.strip().rpartition("\n")[2])


def _end(process: subprocess.Popen[str]) -> None:
    """Tell a rehearsal to end, so that it ends its nodes and removes their directories."""
    if process.poll() is not None:
        return
    process.terminate()
    try:
        process.communicate(timeout=_END_SECONDS)
    except subprocess.TimeoutExpired:
        process.kill()


def _line(outcome: Outcome) -> str:
    state = "passed" if outcome.passed else f"FAILED: {outcome.why}"
    return f"seed {outcome.seed}: {outcome.recovered}/{outcome.planned} in {outcome.seconds:.0f} s  {state}"


def report(outcomes: list[Outcome], root: Path) -> int:
    """Print the sum; return 1 if a run failed."""
    failed = [outcome for outcome in outcomes if not outcome.passed]
    planned = sum(outcome.planned for outcome in outcomes)
    recovered = sum(outcome.recovered for outcome in outcomes)
    print(f"SOAK recovered={recovered}/{planned} runs={len(outcomes)} failed={len(failed)} in {root}")  # noqa: T201
    return 1 if failed else 0


def _problem(verdict: dict[str, Any] | None) -> str:
    if verdict is None or verdict["passed"]:
        return ""
    missing = [
        f"{fault['kind']} in rank {fault['rank']} at step {fault['step']}, {fault['point']}"
        for fault in verdict["faults"]
        if not fault["recovered"]
    ]
    return "; ".join([verdict["verdict"], *missing])


if __name__ == "__main__":
    sys.exit(main())
