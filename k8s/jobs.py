"""Holdfast's Jobs in a cluster: which one a name means, what state it is in, what belongs to it."""

from __future__ import annotations

import argparse
from typing import Any, Literal

from k8s import trainer
from k8s.kubectl import Kubectl
from k8s.pod import COMPONENT_LABEL, INSTANCE_LABEL, RUN_LABEL
from training.errors import RunError

State = Literal["queued", "pending", "running", "stopping", "stopped", "complete", "failed"]
KINDS_OF_A_JOB = ("job", "service", "configmap", "poddisruptionbudget", "role", "rolebinding")
DEFAULT_NAMESPACE = "training"
_DELETE_SECONDS = 300
STOP: dict[str, Any] = {"spec": {"parallelism": 0}}
"""Change that ends all pods of a Job, each with its grace period, and keeps the Job and its control store.
Suspending would do the same, but a queue that has admitted the Job resumes it."""


class NoSuchJob(RunError):
    """A name that no run and no Job of the namespace has."""


def add_cluster_arguments(parser: argparse.ArgumentParser, *, with_name: bool = True) -> None:
    """Add the arguments that say which cluster, and which run or Job in it."""
    if with_name:
        parser.add_argument("name", metavar="NAME", help="a run (job.name of its recipe) or one of its Jobs")
        parser.add_argument(
            "--namespace", default=DEFAULT_NAMESPACE, help="namespace of the run (default: %(default)s)"
        )
    parser.add_argument("--context", default="", help="context of the kubeconfig (default: the current one)")


def kubectl_of(options: argparse.Namespace) -> Kubectl:
    return Kubectl(namespace=options.namespace, context=options.context)


def find_job(kubectl: Kubectl, name: str) -> dict[str, Any]:
    """Return the Job of this name, or the newest training Job of the run of this name.

    Raises:
        NoSuchJob: There is neither.
    """
    job = kubectl.get("job", name)
    if job is not None:
        return job
    jobs = jobs_of_run(kubectl, name)
    if not jobs:
        raise NoSuchJob(
            f"NAME={name!r}: no such run or Job in namespace {kubectl.namespace!r}; "
            f"`kubectl get jobs -n {kubectl.namespace} -l app.kubernetes.io/name=holdfast` lists them"
        )
    return jobs[-1]


def jobs_of_run(kubectl: Kubectl, run: str) -> list[dict[str, Any]]:
    """Return the training Jobs of a run, the newest last."""
    jobs = kubectl.list_objects("job", selector=f"{RUN_LABEL}={run},{COMPONENT_LABEL}={trainer.COMPONENT}")
    return sorted(jobs, key=lambda job: str(job["metadata"]["creationTimestamp"]))


def state_of(job: dict[str, Any]) -> State:
    """Return what a Job is doing."""
    if is_true(job, "Complete"):
        return "complete"
    if is_true(job, "Failed"):
        return "failed"
    status = job.get("status", {})
    if "deletionTimestamp" in job["metadata"]:
        return "stopping"
    if job["spec"].get("parallelism") == 0:
        return "stopping" if status.get("active") or status.get("terminating") else "stopped"
    if job["spec"].get("suspend"):
        return "queued"
    return "running" if status.get("ready") else "pending"


def is_finished(job: dict[str, Any]) -> bool:
    return state_of(job) in ("complete", "failed", "stopped")


def failure_of(job: dict[str, Any]) -> str:
    """Return why a Job failed, in the words of the Job controller; empty where it did not."""
    for condition in _conditions(job):
        if condition["type"] == "Failed" and condition["status"] == "True":
            return f"{condition.get('reason', '')}: {condition.get('message', '')}"
    return ""


def is_true(job: dict[str, Any], condition_type: str) -> bool:
    return any(c["type"] == condition_type and c["status"] == "True" for c in _conditions(job))


def component_of(job: dict[str, Any]) -> str:
    """Return what a Job does, which is also the name of its container: trainer, prepare, export."""
    return str(job["metadata"]["labels"][COMPONENT_LABEL])


def selector_of(job_name: str, *, component: str = "") -> str:
    """Return the label selector of what belongs to a Job."""
    of_component = f",{COMPONENT_LABEL}={component}" if component else ""
    return f"{INSTANCE_LABEL}={job_name}{of_component}"


def grace_seconds(job: dict[str, Any]) -> int:
    """Return how long the pods of a Job have from SIGTERM to SIGKILL."""
    return int(job["spec"]["template"]["spec"]["terminationGracePeriodSeconds"])


def delete_objects(kubectl: Kubectl, job_name: str) -> str:
    """Delete a Job and all that belongs to it; return what was deleted, an object a line."""
    # foreground: the name is free again only when the last pod has ended
    arguments = ("--cascade=foreground", "--ignore-not-found", f"--timeout={_DELETE_SECONDS}s", "--wait")
    kinds = ",".join(KINDS_OF_A_JOB)
    selector = f"--selector={selector_of(job_name)}"
    return kubectl.run("delete", kinds, selector, *arguments, request_timeout="0")


def _conditions(job: dict[str, Any]) -> list[dict[str, Any]]:
    return list(job.get("status", {}).get("conditions", []))
