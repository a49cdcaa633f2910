"""Everything that takes several GPUs of one host, measured in one resumable run.

    python -m bench.multi_gpu --output gpu.jsonl                         all, on all GPUs of this machine
    python -m bench.multi_gpu --output gpu.jsonl --budget-seconds 540    stop before; start again to go on
    python -m bench.multi_gpu --output gpu.jsonl --table                 the tables of docs/benchmarks.md
    python -m bench.multi_gpu --output gpu.jsonl --plot snapshots.svg    its plot
    python -m bench.multi_gpu --output try.jsonl --device cpu --tiny     small, to try it

Needs token shards: `python -m training prepare`.
"""

from __future__ import annotations

import argparse
import logging
import signal
import subprocess
import sys
import time
from collections.abc import Sequence
from pathlib import Path

from bench.multi_gpu import machine, plot
from bench.multi_gpu.plan import Measurement, measurements
from bench.multi_gpu.results import Results
from bench.multi_gpu.runs import BenchmarkError, Settings
from bench.multi_gpu.table import render
from training.errors import EXIT_STOPPED, ConfigError, HoldfastError
from training.processes import adopt_orphans, end_descendants

logger = logging.getLogger("bench.multi_gpu")


def main(argv: Sequence[str] | None = None) -> int:
    arguments = _parser().parse_args(argv)
    try:
        return _run(arguments)
    except HoldfastError as error:
        print(f"error: {error}", file=sys.stderr)  # noqa: T201
        return error.exit_code


def _run(arguments: argparse.Namespace) -> int:
    logging.basicConfig(level=logging.INFO, format="%(asctime)s %(message)s", datefmt="%H:%M:%S")
    results = Results(arguments.output)
    if (arguments.table or arguments.plot) and not results.rows:
        raise ConfigError.of("--output", str(arguments.output), "holds no rows", "measure first")
    if arguments.table:
        print(render(results.rows))  # noqa: T201
        return 0
    if arguments.plot:
        arguments.plot.write_text(plot.contention(results.rows))
        return 0
    if arguments.device == "cuda" and not machine.gpu_count():
        raise ConfigError.of("--device", "cuda", "there is no GPU", "try it with --device cpu --tiny")
    deadline = time.monotonic() + arguments.budget_seconds
    adopt_orphans()
    signal.signal(signal.SIGTERM, lambda number, frame: sys.exit(EXIT_STOPPED))  # ends what runs
    settings = Settings(
        directory=arguments.directory,
        data=arguments.data,
        device=arguments.device,
        gpus=arguments.ranks or machine.gpu_count() or 1,
        tiny=arguments.tiny,
    )
    all_measured = True
    for measurement in measurements(settings):
        if arguments.only and not any(part in measurement.name for part in arguments.only):
            continue
        if arguments.again or not results.has(measurement.name):
            seconds_left = deadline - time.monotonic()
            all_measured &= _measure(measurement, settings, results, seconds_left=seconds_left)
    return 0 if all_measured else 1


def _measure(measurement: Measurement, settings: Settings, results: Results, *, seconds_left: float) -> bool:
    """Measure, if there is time; say whether nothing has failed."""
    if seconds_left < measurement.seconds:
        logger.info("%s: left for the next run, %.0f s are left", measurement.name, seconds_left)
        return True
    logger.info("%s ...", measurement.name)
    start = time.monotonic()
    try:
        rows = measurement.measure(settings)
    except (BenchmarkError, subprocess.TimeoutExpired) as error:
        logger.error("%s: %s", measurement.name, error)
        rows = [{"section": measurement.section, "failure": str(error)[-2000:]}]
    finally:
        end_descendants()  # ranks of a launcher that was killed at its limit
    results.add(measurement.name, rows, machine=machine.describe())
    for row in rows:
        logger.info("  %s", {key: value for key, value in row.items() if key != "failure"})
    logger.info("%s: %.0f s", measurement.name, time.monotonic() - start)
    return not any("failure" in row for row in rows)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="bench.multi_gpu", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument(
        "--output", type=Path, required=True, help="JSON lines; what is there is not repeated"
    )
    parser.add_argument("--budget-seconds", type=float, default=1e9, help="begin nothing that takes longer")
    parser.add_argument("--only", action="append", help="only measurements whose name contains this")
    parser.add_argument("--again", action="store_true", help="also measure what is there")
    parser.add_argument("--table", action="store_true", help="measure nothing, print the table")
    parser.add_argument("--plot", type=Path, help="measure nothing, write the plot of section 2 as SVG")
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--ranks", type=int, help="default: one a GPU")
    parser.add_argument("--tiny", action="store_true", help="smallest sizes")
    parser.add_argument("--data", type=Path, default=Path("runs/data/python-stdlib"))
    parser.add_argument("--directory", type=Path, default=Path("runs/multi-gpu"))
    return parser


if __name__ == "__main__":
    sys.exit(main())
