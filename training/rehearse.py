"""`training rehearse`: a whole run with planned faults on this machine, and the verdict over it.

    python -m training rehearse training/recipes/rehearsal_cpu.toml
    python -m training rehearse RECIPE --random-faults 12 --seed 7

Runs the recipe twice, with its faults and without, and compares every loss and the final checkpoint.
Exits 0 only if every fault hit and left no trace.
"""

from __future__ import annotations

import argparse
import json
import signal
import sys
import time
from dataclasses import dataclass
from pathlib import Path

from training.config import JobConfig, load_recipe
from training.errors import EXIT_DONE, EXIT_RETRY, EXIT_STOPPED, ConfigError, RunError
from training.events import read_events
from training.fault_plans import random_plan
from training.files import check_writable
from training.goodput import ledger
from training.processes import adopt_orphans
from training.rehearsal.isolation import Isolation, isolation
from training.rehearsal.page import write_page
from training.rehearsal.plan_file import write_recipe
from training.rehearsal.progress import Progress
from training.rehearsal.reference import Reference
from training.rehearsal.report import report_lines
from training.rehearsal.simulation import SimulatedCluster
from training.rehearsal.verdict import Verdict, judge_faults, same_losses


def main(argv: list[str]) -> int:
    """Run `training rehearse`."""
    parser = argparse.ArgumentParser(prog="training rehearse", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path, help="TOML file with [[rehearsal.faults]]")
    parser.add_argument("--run-dir", type=Path, help="default: runs/NAME-TIME")
    parser.add_argument("--json", action="store_true", help="print one JSON object")
    parser.add_argument(
        "--undisturbed",
        type=Path,
        metavar="DIR",
        help="undisturbed run of the same shape to compare with; made there if there is none",
    )
    parser.add_argument(
        "--random-faults", type=int, metavar="N", help="N random faults in place of the recipe's"
    )
    parser.add_argument("--seed", type=int, default=0, help="of the random faults; default: %(default)s")
    arguments = parser.parse_args(argv)
    config = load_recipe(arguments.recipe)
    started = time.strftime("%Y%m%d-%H%M%S")
    run_dir = arguments.run_dir or Path("runs") / f"{config.job.name}-{started}"
    for setting, directory in (("--run-dir", run_dir), ("--undisturbed", arguments.undisturbed)):
        if directory is not None:
            check_writable(directory, setting)
    if run_dir.exists() and any(run_dir.iterdir()):
        fix = "give an empty --run-dir, or none for a new one"
        raise ConfigError.of("--run-dir", str(run_dir), "is not empty", fix)
    recipe = arguments.recipe
    if arguments.random_faults is not None:
        plan = random_plan(config, seed=arguments.seed, count=arguments.random_faults)
        recipe, config = write_recipe(recipe, plan, run_dir)
    # With --json the standard output belongs to the program that reads it
    progress = Progress(config, file=sys.stderr if arguments.json else sys.stdout)
    rehearsal = Rehearsal(config=config, recipe=recipe, run_dir=run_dir, progress=progress)
    verdict = rehearsal.run(arguments.undisturbed or run_dir / "undisturbed")
    page = write_page(run_dir, config, verdict)
    if arguments.json:
        print(json.dumps({**verdict.as_dict(), "run_dir": str(run_dir), "page": str(page)}))  # noqa: T201
    else:
        print("\n".join(report_lines(verdict, run_dir, page)))  # noqa: T201
    return EXIT_DONE if verdict.passed else EXIT_RETRY


@dataclass(frozen=True, kw_only=True, slots=True)
class Rehearsal:
    """A recipe, run with its faults and without."""

    config: JobConfig
    recipe: Path
    run_dir: Path
    progress: Progress

    def run(self, undisturbed: Path) -> Verdict:
        """Run both, and judge.

        Args:
            undisturbed: Directory of the undisturbed run, which is not run again if it is there.

        Raises:
            ConfigError: The recipe cannot run, or lies where nodes can't see it.
            RunError: A run failed for good.
        """
        adopt_orphans()
        signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_STOPPED))
        disturbed = self.run_dir / "disturbed"
        with isolation() as kind:
            kind.check_visible(self.run_dir, setting="--run-dir")
            kind.check_visible(undisturbed, setting="--undisturbed")
            kind.check_visible(Path(self.config.data.path), setting="data.path")
            reference = Reference.cached(undisturbed, self.config)  # refused now, not after a run
            self._run_once(disturbed, kind, with_faults=True)
            if reference is None:
                self._run_once(undisturbed, kind, with_faults=False)
                reference = Reference.of_run(undisturbed)
                reference.save(undisturbed, self.config)
        return self._judge(disturbed, reference)

    def _run_once(self, directory: Path, kind: Isolation, *, with_faults: bool) -> None:
        cluster = SimulatedCluster(
            self.config, recipe=self.recipe, run_dir=directory, isolation=kind, with_faults=with_faults
        )
        with cluster:
            code = cluster.wait(self.progress.watch(directory))
        if code != EXIT_DONE:
            errors = "\n".join(_errors_in(directory / "logs"))
            error = RunError(errors or f"{directory}: the run ended with {code}; see {directory / 'logs'}")
            error.exit_code = code
            raise error

    def _judge(self, disturbed: Path, reference: Reference) -> Verdict:
        config, events, result = self.config, read_events(disturbed), Reference.of_run(disturbed)
        account = ledger(events)
        shape = {"world_size": config.job.world_size, "steps": config.training.steps}
        return Verdict(
            faults=judge_faults(config.rehearsal.faults, events, account.restarts),
            finished=(disturbed / "DONE").exists(),
            steps=config.training.steps,
            identical_loss=same_losses(result.losses, reference.losses, **shape),
            identical_params=result.state == reference.state,
            goodput_percent=100 * account.goodput,
        )


def _errors_in(logs: Path) -> list[str]:
    """Return what ranks said about settings that are wrong, each message once."""
    lines = [line for log in sorted(logs.glob("*.log")) for line in log.read_text().splitlines()]
    return list(dict.fromkeys(line.removeprefix("error: ") for line in lines if line.startswith("error: ")))
