"""`k8s logs`: the logs of a run's nodes, of the node that a rank runs on, or of the control store."""

from __future__ import annotations

import argparse
from collections.abc import Iterator

from k8s import control, jobs
from k8s.command_line import command_parser
from k8s.report import PodStatus, cluster_report
from training.errors import RunError

_MAXIMUM_PODS_FOLLOWED = 100


def main(arguments: list[str]) -> int:
    parser = command_parser("logs", __doc__)
    jobs.add_cluster_arguments(parser)
    choice = parser.add_mutually_exclusive_group()
    choice.add_argument(
        "--rank", type=int, help="the node that this rank runs on now; its lines say `rank N`"
    )
    choice.add_argument("--index", type=int, help="the pod with this completion index")
    choice.add_argument("--control", action="store_true", help="the control store")
    parser.add_argument("--follow", action="store_true", help="go on until interrupted")
    parser.add_argument("--tail", type=int, default=200, help="last lines a pod, -1 for all (%(default)s)")
    options = parser.parse_args(arguments)
    for line in jobs.kubectl_of(options).stream("logs", *_arguments(options)):
        print(line, end="", flush=True)  # noqa: T201
    return 0


def _arguments(options: argparse.Namespace) -> Iterator[str]:
    """Yield the arguments of `kubectl logs` that choose pods, container and lines."""
    kubectl = jobs.kubectl_of(options)
    job = jobs.find_job(kubectl, options.name)
    component = control.COMPONENT if options.control else jobs.component_of(job)
    yield from (f"--tail={options.tail}", f"--container={component}")
    if options.follow:
        yield "--follow"
    if options.rank is None and options.index is None:
        yield f"--selector={jobs.selector_of(job['metadata']['name'], component=component)}"
        yield from ("--prefix", f"--max-log-requests={_MAXIMUM_PODS_FOLLOWED}")
    else:
        pods = cluster_report(kubectl, options.name).pods
        yield _pod_of(pods, rank=options.rank, index=options.index).name


def _pod_of(pods: list[PodStatus], *, rank: int | None, index: int | None) -> PodStatus:
    """Return the newest pod of a completion index, or of the node that a rank runs on."""
    found = [pod for pod in pods if pod.index == index or (rank is not None and rank in pod.ranks)]
    if found:
        return max(found, key=lambda pod: pod.created)
    known = ", ".join(f"{pod.index}: ranks {pod.ranks or '-'}" for pod in pods)
    asked = f"--index={index}" if rank is None else f"--rank={rank}"
    raise RunError(f"{asked}: no pod runs it now; pods are {known or 'none'}")
