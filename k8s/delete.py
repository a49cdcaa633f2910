"""`k8s delete`: stop a run and remove its objects; checkpoints and events stay."""

from __future__ import annotations

from k8s import jobs
from k8s.command_line import command_parser
from k8s.trainer import DIRECTORY_ANNOTATION


def main(arguments: list[str]) -> int:
    parser = command_parser("delete", __doc__)
    jobs.add_cluster_arguments(parser)
    options = parser.parse_args(arguments)
    kubectl = jobs.kubectl_of(options)
    job = jobs.find_job(kubectl, options.name)
    metadata = job["metadata"]
    if not jobs.is_finished(job):
        seconds = jobs.grace_seconds(job)
        print(f"stopping {metadata['name']}: its pods have {seconds} s to end", flush=True)  # noqa: T201
    print(jobs.delete_objects(kubectl, job), end="")  # noqa: T201
    directory = metadata.get("annotations", {}).get(DIRECTORY_ANNOTATION)
    if directory:
        print(f"{directory} stays on the shared file system")  # noqa: T201
    return 0
