"""`k8s render`: write a Job and what belongs to it as YAML for `kubectl apply -f -`."""

from __future__ import annotations

import argparse
import sys
from pathlib import Path

from k8s.command_line import command_parser
from k8s.manifests import JOB_KINDS, render
from k8s.outputs import load_outputs
from k8s.run import Run, load_run


def main(arguments: list[str]) -> int:
    parser = command_parser("render", __doc__)
    add_run_arguments(parser)
    parser.add_argument(
        "--with-prerequisites",
        action="store_true",
        help="also namespace, service accounts, PV and PVC, for a cluster that the stacks did not set up",
    )
    options = parser.parse_args(arguments)
    text = render(run_of(options), options.job, with_prerequisites=options.with_prerequisites)
    sys.stdout.write(text)
    return 0


def add_run_arguments(parser: argparse.ArgumentParser) -> None:
    """Add the arguments that name a recipe, a cluster and one of the recipe's Jobs."""
    parser.add_argument("recipe", type=Path, metavar="RECIPE", help="job recipe, a .toml file")
    parser.add_argument(
        "--outputs",
        type=Path,
        required=True,
        metavar="FILE",
        help="what `cdk deploy --outputs-file FILE` wrote",
    )
    parser.add_argument("--job", choices=JOB_KINDS, default="train", help="which Job (default: train)")


def run_of(options: argparse.Namespace) -> Run:
    return load_run(options.recipe, load_outputs(options.outputs))
