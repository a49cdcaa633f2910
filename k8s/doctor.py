"""`k8s doctor`: what is wrong with an account before the deploy, or with a cluster after it.

Exit code 0: all is well; 1: warnings; 2: something fails.
"""

from __future__ import annotations

import argparse
import json
from collections.abc import Iterable, Iterator
from pathlib import Path

from k8s.after_deploy import DeployedCluster
from k8s.before_deploy import Account
from k8s.checkpoint_time import check_checkpoint_time
from k8s.command_line import command_parser, positive
from k8s.findings import Check, Finding, as_json, as_table, exit_code, fail, ok, warn
from k8s.images import check_images
from k8s.jobs import add_cluster_arguments
from k8s.kubectl import Kubectl
from k8s.outputs import load_outputs
from k8s.run import fit, load_run
from k8s.smoke import run_smoke
from stacks.config import ClusterConfig, from_context
from training.config import JobConfig, load_recipe
from training.errors import ConfigError, RunError


def main(arguments: list[str]) -> int:
    parser = command_parser("doctor", __doc__)
    parser.add_argument("recipe", type=Path, nargs="?", metavar="RECIPE", help="a run that is to fit")
    stage = parser.add_mutually_exclusive_group()
    stage.add_argument(
        "--cluster",
        type=Path,
        default=Path("cdk.json"),
        metavar="FILE",
        help="before the deploy: file with the `cluster` context (default: %(default)s)",
    )
    stage.add_argument("--outputs", type=Path, metavar="FILE", help="after the deploy: outputs of the stacks")
    parser.add_argument(
        "--smoke", action="store_true", help="after the deploy: also run pods, for mount and NCCL over EFA"
    )
    parser.add_argument(
        "--step-seconds", type=positive, metavar="S", help="time of a step, to judge the checkpoint interval"
    )
    parser.add_argument("--json", action="store_true", help="for programs")
    add_cluster_arguments(parser, with_name=False)
    options = parser.parse_args(arguments)
    findings = list(run_checks(_checks(options)))
    print(as_json(findings) if options.json else as_table(findings))  # noqa: T201
    return exit_code(findings)


def run_checks(checks: Iterable[Check]) -> Iterator[Finding]:
    """Run checks; one that may not look (no permission, no network) is a warning and hides no other."""
    from botocore.exceptions import BotoCoreError, ClientError

    blind: set[Finding] = set()  # without credentials all checks say the same
    for check in checks:
        try:
            yield from check()
            continue
        except (BotoCoreError, ClientError) as error:
            reason = warn("aws", f"could not look: {error}", "check credentials, permissions and region")
        except RunError as error:
            reason = warn("kubernetes", f"could not look: {error}", "check the context and your rights")
        if reason not in blind:
            blind.add(reason)
            yield reason


def load_cluster(path: Path) -> ClusterConfig:
    """Read the `cluster` context of a cdk.json.

    Raises:
        ConfigError: The file can't be read, or the context is wrong.
    """
    try:
        content = json.loads(path.read_text())
    except (OSError, ValueError) as error:
        raise ConfigError.of("--cluster", str(path), f"cannot be read ({error})", "give cdk.json") from error
    context = content.get("context") if isinstance(content, dict) else None
    if not isinstance(context, dict):
        raise ConfigError.of("--cluster", str(path), "has no `context` table", "give cdk.json")
    return from_context(context.get("cluster"))


def _checks(options: argparse.Namespace) -> Iterator[Check]:
    if options.smoke and not (options.outputs and options.recipe):
        fix = "give the recipe that is to run and the outputs of the stacks"
        raise ConfigError.of("--smoke", None, "needs RECIPE and --outputs", fix)
    return _after(options) if options.outputs else _before(options)


def _before(options: argparse.Namespace) -> Iterator[Check]:
    import boto3

    config = load_cluster(options.cluster)
    recipe = load_recipe(options.recipe) if options.recipe else None
    yield from Account(config=config, session=boto3.Session()).checks()
    if recipe is not None:
        yield lambda: check_fit(recipe, config)
        yield _checkpoint_check(recipe, options, capacity_gib=config.storage.capacity_gib)


def check_fit(recipe: JobConfig, config: ClusterConfig) -> Iterator[Finding]:
    """Check whether the cluster that the settings describe could run a recipe."""
    gpu = config.gpu
    try:
        resources = fit(
            recipe,
            gpu.instance,
            nodes=gpu.group_size,
            kubernetes_version=config.kubernetes_version,
            file_system_capacity_gib=config.storage.capacity_gib,
        )
    except ConfigError as error:
        for problem in error.problems:
            yield fail("recipe", str(problem).removesuffix(f"; {problem.fix}"), problem.fix)
        return
    yield ok(
        "recipe", f"fits: {resources.memory_gib} GiB a pod, {resources.shared_memory_gib} of them /dev/shm"
    )


def _after(options: argparse.Namespace) -> Iterator[Check]:
    import boto3

    outputs = load_outputs(options.outputs)
    run = load_run(options.recipe, outputs) if options.recipe else None
    kubectl = Kubectl(namespace=outputs.namespace, context=options.context)
    yield from DeployedCluster(outputs=outputs, kubectl=kubectl, run=run).checks()
    yield lambda: check_images(outputs, boto3.Session())
    if run is not None:
        yield _checkpoint_check(run.recipe, options, capacity_gib=outputs.file_system_capacity_gib)
        if options.smoke:
            yield lambda: run_smoke(kubectl, run)


def _checkpoint_check(recipe: JobConfig, options: argparse.Namespace, *, capacity_gib: int) -> Check:
    step_seconds = options.step_seconds
    return lambda: check_checkpoint_time(recipe, capacity_gib=capacity_gib, step_seconds=step_seconds)
