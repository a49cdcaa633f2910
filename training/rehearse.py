"""`training rehearse`: a whole run with planned faults on this machine, and the verdict over it.

    python -m training rehearse training/recipes/rehearsal_cpu.toml

Runs the recipe twice, with its faults and without, and compares every loss and the final checkpoint.
Exits 0 only if every fault hit and left no trace.
"""

from __future__ import annotations

import argparse
import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

from training.config import JobConfig, load_recipe
from training.errors import EXIT_DONE, EXIT_RETRY, EXIT_STOPPED, ConfigError, RunError
from training.events import read_events
from training.goodput import ledger
from training.processes import adopt_orphans
from training.rehearsal.isolation import isolation
from training.rehearsal.progress import Progress
from training.rehearsal.report import report_lines
from training.rehearsal.simulation import SimulatedCluster
from training.rehearsal.verdict import Verdict, judge_faults, losses, same_losses

FINGERPRINT_SECONDS = 600


def main(argv: list[str]) -> int:
    """Run `training rehearse`."""
    parser = argparse.ArgumentParser(prog="training rehearse", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path, help="TOML file with [[rehearsal.faults]]")
    parser.add_argument("--run-dir", type=Path, help="default: runs/NAME-TIME")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    arguments = parser.parse_args(argv)
    config = load_recipe(arguments.recipe)
    started = time.strftime("%Y%m%d-%H%M%S")
    run_dir = arguments.run_dir or Path("runs") / f"{config.job.name}-{started}"
    # With --json the standard output belongs to the program that reads it
    progress = Progress(config, file=sys.stderr if arguments.json else sys.stdout)
    verdict = rehearse(config, recipe=arguments.recipe, run_dir=run_dir, progress=progress)
    if arguments.json:
        print(json.dumps({**verdict.as_dict(), "run_dir": str(run_dir)}))  # noqa: T201
    else:
        print("\n".join(report_lines(verdict, run_dir)))  # noqa: T201
    return EXIT_DONE if verdict.passed else EXIT_RETRY


def rehearse(config: JobConfig, *, recipe: Path, run_dir: Path, progress: Progress) -> Verdict:
    """Run the recipe with its faults and without, and judge.

    Raises:
        ConfigError: The recipe cannot run, or the run directory is in use.
        RunError: A run failed for good.
    """
    if run_dir.exists() and any(run_dir.iterdir()):
        fix = "give an empty --run-dir, or none for a new one"
        raise ConfigError.of("--run-dir", str(run_dir), "is not empty", fix)
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_STOPPED))
    disturbed, undisturbed = run_dir / "disturbed", run_dir / "undisturbed"
    with isolation() as kind:
        kind.check_visible(run_dir, setting="--run-dir")
        kind.check_visible(Path(config.data.path), setting="data.path")
        for directory, with_faults in ((disturbed, True), (undisturbed, False)):
            cluster = SimulatedCluster(
                config, recipe=recipe, run_dir=directory, isolation=kind, with_faults=with_faults
            )
            _run(cluster, directory, progress)
    return _judge(config, disturbed, undisturbed)


def _run(cluster: SimulatedCluster, directory: Path, progress: Progress) -> None:
    with cluster:
        code = cluster.wait(progress.watch(directory))
    if code != EXIT_DONE:
        errors = "\n".join(_errors_in(directory / "logs"))
        error = RunError(errors or f"{directory}: the run ended with {code}; see {directory / 'logs'}")
        error.exit_code = code
        raise error


def _errors_in(logs: Path) -> list[str]:
    """Return what ranks said about settings that are wrong, each message once."""
    lines = [line for log in sorted(logs.glob("*.log")) for line in log.read_text().splitlines()]
    return list(dict.fromkeys(line.removeprefix("error: ") for line in lines if line.startswith("error: ")))


def _judge(config: JobConfig, disturbed: Path, undisturbed: Path) -> Verdict:
    events, twin = read_events(disturbed), read_events(undisturbed)
    shape = {"world_size": config.job.world_size, "steps": config.training.steps}
    account = ledger(events)
    fingerprints = [_fingerprint(path) for path in (disturbed, undisturbed)]
    return Verdict(
        faults=judge_faults(config.rehearsal.faults, events, account.restarts),
        finished=all((path / "DONE").exists() for path in (disturbed, undisturbed)),
        steps=config.training.steps,
        identical_loss=same_losses(losses(events), losses(twin), **shape),
        identical_params=fingerprints[0] == fingerprints[1],
        goodput_percent=100 * account.goodput,
    )


def _fingerprint(run_dir: Path) -> dict[str, Any]:
    """Return step and sha256 of a run's last checkpoint, as a process of its own sees it."""
    command = [sys.executable, "-m", "training", "fingerprint", str(run_dir)]
    done = subprocess.run(command, capture_output=True, text=True, timeout=FINGERPRINT_SECONDS)
    if done.returncode != 0:
        raise RunError(f"{run_dir}: its last checkpoint cannot be read\n{done.stderr.strip()}")
    value = json.loads(done.stdout)
    return {"step": value["step"], "sha256": value["sha256"]}
