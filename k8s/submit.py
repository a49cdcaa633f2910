"""`k8s submit`: start a recipe's Job, once."""

from __future__ import annotations

from datetime import UTC, datetime

from k8s import jobs
from k8s.command_line import command_parser
from k8s.kubectl import Kubectl
from k8s.manifests import JobKind, as_yaml, job_objects
from k8s.pod import Manifest
from k8s.render import add_run_arguments, run_of
from k8s.run import Run
from training.errors import RunError


def main(arguments: list[str]) -> int:
    parser = command_parser("submit", __doc__)
    add_run_arguments(parser)
    jobs.add_cluster_arguments(parser, with_name=False)
    parser.add_argument(
        "--dry-run", choices=["server"], help="let the API server check everything and store nothing"
    )
    options = parser.parse_args(arguments)
    run = run_of(options)
    kubectl = Kubectl(namespace=run.outputs.namespace, context=options.context)
    print(submit(kubectl, run, options.job, dry_run=options.dry_run == "server"), end="")  # noqa: T201
    return 0


def submit(kubectl: Kubectl, run: Run, kind: JobKind = "train", *, dry_run: bool = False) -> str:
    """Apply a Job and what belongs to it; return what happened, an object a line.

    A Job of the same name that has ended or was stopped is removed first, so that the run goes on from its
    checkpoints. One that is alive is left as it is: applied again, it would be suspended again where a queue
    has admitted it.

    Raises:
        RunError: The run is in use by another Job, or the API server refuses an object.
    """
    objects = job_objects(run, kind)
    name = objects[-1]["metadata"]["name"]
    if kind == "train":
        _refuse_rivals(kubectl, run.recipe.job.name, name)
        _refuse_ended_capacity(run)
    if dry_run:
        return kubectl.apply(as_yaml(objects), dry_run=True)
    job = kubectl.get("job", name)
    if job is not None and jobs.is_finished(job):
        jobs.delete_objects(kubectl, name)
        job = None
    applied = kubectl.apply(as_yaml(objects if job is None else objects[:-1]))
    _tie_to_job(kubectl, objects)
    return applied if job is None else f"{applied}job.batch/{name} is {jobs.state_of(job)} already\n"


def _refuse_rivals(kubectl: Kubectl, run: str, name: str) -> None:
    """Refuse a second Job that would write into the run directory of a living one."""
    for job in jobs.jobs_of_run(kubectl, run):
        other, state = job["metadata"]["name"], jobs.state_of(job)
        if state == "stopping":
            raise RunError(f"job.name={run!r}: Job {other} is stopping; submit again when its pods are gone")
        if other != name and not jobs.is_finished(job):
            raise RunError(
                f"job.name={run!r}: Job {other} of this run is {state}; stop it with "
                f"`python -m k8s delete {other}` (checkpoints stay, the new Job goes on from them), "
                "or choose another name"
            )


def _refuse_ended_capacity(run: Run) -> None:
    if run.stop_at is not None and run.stop_at <= datetime.now(UTC):
        raise RunError(
            f"outputs.CapacityEnd={run.outputs.capacity_end!r}: runs stopped at {run.stop_at:%F %R} UTC, "
            "for their last save; deploy other capacity"
        )


def _tie_to_job(kubectl: Kubectl, objects: list[Manifest]) -> None:
    """Make the Job, the last object, the owner of the others: they go when it goes, by TTL or by hand."""
    *others, own = objects
    job = kubectl.get("job", own["metadata"]["name"])
    if job is None:
        return
    metadata = job["metadata"]
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": metadata["name"], "uid": metadata["uid"]}
    kubectl.patch_all(as_yaml(others), {"metadata": {"ownerReferences": [owner]}})
