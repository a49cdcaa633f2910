"""`k8s status`: where a run stands.

What training does comes from the run's events. Inside the cluster the control pod folds them and keeps
the sum in an annotation of the Job (`k8s/publish.py`); this command reads it with the Job, its pods and
nodes, so it needs no mount and no access to pods. With --run-dir it reads the events itself, from the
shared file system or a rehearsal on this machine, and needs no cluster.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import sys
import time
from collections.abc import Callable
from pathlib import Path

from k8s import jobs
from k8s.command_line import command_parser
from k8s.report import Report, cluster_report, directory_reader
from k8s.status_table import render_status
from training.errors import ConfigError, RunError

_WATCH_SECONDS = 5.0
_ENDED = ("complete", "failed", "stopped")
_CLEAR_SCREEN = "\x1b[H\x1b[2J"


def main(arguments: list[str]) -> int:
    parser = command_parser("status", __doc__)
    jobs.add_cluster_arguments(parser)
    parser.add_argument("--run-dir", type=Path, help="read the events there and ask no cluster")
    parser.add_argument("--recipe", type=Path, help="recipe of the run; needed with --run-dir")
    parser.add_argument("--watch", action="store_true", help=f"again every {_WATCH_SECONDS:g} s, to the end")
    parser.add_argument("--json", action="store_true", help="for programs; a line each with --watch")
    options = parser.parse_args(arguments)
    read = _reader(options)
    report = read()
    while True:
        _show(report, options)
        if not options.watch or report.state in _ENDED:
            return 0
        time.sleep(_WATCH_SECONDS)
        report = _newer(read, report)


def _reader(options: argparse.Namespace) -> Callable[[], Report]:
    if options.run_dir is None:
        kubectl = jobs.kubectl_of(options)
        return lambda: cluster_report(kubectl, options.name)
    if options.recipe is None:
        raise ConfigError.of("--recipe", None, "is needed with --run-dir", "give the run's recipe")
    return directory_reader(options.name, options.run_dir, options.recipe)


def _newer(read: Callable[[], Report], known: Report) -> Report:
    """Read again; an API server that is away for a moment does not end a watch of hours."""
    try:
        return read()
    except jobs.NoSuchJob:
        raise
    except RunError as error:
        print(f"warning: {error}; the status is the last one known", file=sys.stderr)  # noqa: T201
        return known


def _show(report: Report, options: argparse.Namespace) -> None:
    if options.json:
        text = json.dumps(dataclasses.asdict(report), indent=None if options.watch else 2)
    else:
        clear = _CLEAR_SCREEN if options.watch and sys.stdout.isatty() else ""
        text = clear + render_status(report, now=time.time())
    print(text, flush=True)  # noqa: T201
