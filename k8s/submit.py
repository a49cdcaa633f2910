"""`k8s submit`: start a recipe's Job, once."""

from __future__ import annotations

from k8s import jobs
from k8s.command_line import command_parser
from k8s.kubectl import Kubectl
from k8s.manifests import JobKind, job_name, job_objects, render
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

    A finished Job of the same name is removed first, so that the run goes on from its checkpoints.

    Raises:
        RunError: The run is in use by another Job, or the API server refuses an object.
    """
    name = job_name(run, kind)
    if kind == "train":
        _refuse_second_job(kubectl, run.recipe.job.name, name)
    manifests = render(run, kind)
    if dry_run:
        return kubectl.apply(manifests, dry_run=True)
    existing = kubectl.get("job", name)
    if existing is not None and jobs.is_finished(existing):
        jobs.delete_objects(kubectl, name)
    applied = kubectl.apply(manifests)
    _tie_to_job(kubectl, run, kind)
    return applied


def _refuse_second_job(kubectl: Kubectl, run: str, name: str) -> None:
    """Refuse a second Job that would write into the run directory of a living one."""
    for job in jobs.jobs_of_run(kubectl, run):
        other = job["metadata"]["name"]
        if other != name and not jobs.is_finished(job):
            raise RunError(
                f"job.name={run!r}: Job {other} of this run is {jobs.state_of(job)}; stop it with "
                f"`python -m k8s delete {other}` (checkpoints stay, the new Job goes on from them), "
                "or choose another name"
            )


def _tie_to_job(kubectl: Kubectl, run: Run, kind: JobKind) -> None:
    """Make the Job the owner of its objects, so that they go when it goes, by TTL or by hand."""
    name = job_name(run, kind)
    job = kubectl.get("job", name)
    if job is None:
        return
    owner = {"apiVersion": "batch/v1", "kind": "Job", "name": name, "uid": job["metadata"]["uid"]}
    for manifest in job_objects(run, kind):
        if manifest["metadata"]["name"] != name or manifest["kind"] != "Job":
            change = {"metadata": {"ownerReferences": [owner]}}
            kubectl.patch(manifest["kind"].lower(), manifest["metadata"]["name"], change)
