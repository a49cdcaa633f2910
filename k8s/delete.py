"""`k8s delete`: stop a run and remove its Kubernetes objects. Checkpoints and events stay."""

from __future__ import annotations

import time

from k8s import jobs
from k8s.command_line import command_parser
from k8s.kubectl import Kubectl
from k8s.report import PodStatus, cluster_report
from k8s.trainer import DIRECTORY_ANNOTATION
from training.errors import RunError

_POLL_SECONDS = 2.0
_MARGIN_SECONDS = 60  # over the pods' grace
_PODS_SHOWN = 3


def main(arguments: list[str]) -> int:
    parser = command_parser("delete", __doc__)
    jobs.add_cluster_arguments(parser)
    options = parser.parse_args(arguments)
    kubectl = jobs.kubectl_of(options)
    job = jobs.find_job(kubectl, options.name)
    metadata = job["metadata"]
    if not jobs.is_finished(job):
        _stop(kubectl, metadata["name"], grace_seconds=jobs.grace_seconds(job))
    print(jobs.delete_objects(kubectl, metadata["name"]), end="")  # noqa: T201
    directory = metadata.get("annotations", {}).get(DIRECTORY_ANNOTATION)
    if directory:
        print(f"{directory} stays on the shared file system")  # noqa: T201
    return 0


def _stop(kubectl: Kubectl, name: str, *, grace_seconds: int) -> None:
    """End a Job's pods while its control store lives, without which they can't save; show which are left.

    Raises:
        RunError: A pod is there for longer than it may take to end.
    """
    print(f"stopping {name}: its pods have {grace_seconds} s to save and end", flush=True)  # noqa: T201
    kubectl.patch("job", name, jobs.STOP)
    deadline, shown = time.monotonic() + grace_seconds + _MARGIN_SECONDS, ""
    while (report := cluster_report(kubectl, name)).state == "stopping":
        left = _left(report.pods)
        if left != shown:
            print(left, flush=True)  # noqa: T201
            shown = left
        if time.monotonic() > deadline:
            raise RunError(f"{left}; free the pod of a lost node as docs/operating.md says, and delete again")
        time.sleep(_POLL_SECONDS)


def _left(pods: list[PodStatus]) -> str:
    places = [
        f"{pod.name} on {pod.node}{' (not ready)' if pod.node_ready is False else ''}"
        for pod in pods
        if pod.phase not in ("Succeeded", "Failed")
    ]
    more = [f"{len(places) - _PODS_SHOWN} more"] if len(places) > _PODS_SHOWN else []
    return f"pods left: {', '.join([*places[:_PODS_SHOWN], *more]) or 'none'}"
