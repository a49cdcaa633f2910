"""What the API server takes, and what it refuses."""

from __future__ import annotations

import copy
import re
from collections.abc import Callable
from typing import Any

import pytest
import yaml

from k8s.examples import rendered_examples
from k8s.kubectl import Kubectl
from k8s.manifests import JOB_KINDS, job_objects, render
from k8s.prerequisites import prerequisites
from tests.cluster.control_plane import ControlPlane
from tests.cluster.training_run import RunInCluster
from tests.cluster.waiting import wait_until
from training.errors import RunError

Edit = Callable[[dict[str, Any]], Any]


def pod(job: dict[str, Any]) -> dict[str, Any]:
    return job["spec"]["template"]["spec"]  # type: ignore[no-any-return]


def resources(job: dict[str, Any]) -> dict[str, Any]:
    return pod(job)["containers"][0]["resources"]  # type: ignore[no-any-return]


def halve_gpu(job: dict[str, Any]) -> None:
    for part in ("requests", "limits"):
        resources(job)[part]["nvidia.com/gpu"] = "0.5"


def drop_completions(job: dict[str, Any]) -> None:
    # with a success policy left, 1.36.3 panics instead of refusing
    del job["spec"]["completions"], job["spec"]["successPolicy"]


BROKEN: dict[str, tuple[Edit, str]] = {
    "restart policy Always": (
        lambda job: pod(job).update(restartPolicy="Always"),
        'restartPolicy: Required value: valid values: "OnFailure", "Never"',
    ),
    "no completions": (drop_completions, "spec.completions: Required value"),
    "failure policy with OnFailure": (
        lambda job: pod(job).update(restartPolicy="OnFailure"),
        "restartPolicy",
    ),
    "failure policy replaces terminating pods": (
        lambda job: job["spec"].update(podReplacementPolicy="TerminatingOrFailed"),
        "podReplacementPolicy",
    ),
    "name in upper case": (lambda job: job["metadata"].update(name="A_B"), "RFC 1123"),
    "name too long for its pods": (
        lambda job: job["metadata"].update(name="a" * 62),
        "will not able to create pod with invalid DNS label",
    ),
    "half a GPU": (halve_gpu, "must be an integer"),
    "GPU request below limit": (
        lambda job: resources(job)["requests"].update({"nvidia.com/gpu": "4"}),
        "must be equal",
    ),
    "unknown field": (lambda job: job["spec"].update(backofLimit=1), "unknown field"),
    "mount without volume": (lambda job: pod(job).update(volumes=[]), "Not found"),
    "huge pages without memory": (
        lambda job: pod(job)["containers"][0].update(resources={"limits": {"hugepages-2Mi": "4Mi"}}),
        "require cpu or memory",
    ),
    "changed template under the same name": (
        lambda job: pod(job)["containers"][0].update(image="registry.example/other:1"),
        "field is immutable",
    ),
}
OPTIONS = [{"queue": "team-a"}, {"hugepages_mib": 5120}, {"restart_in_place": True}]


@pytest.fixture
def namespaced(make_cluster_run: Any, control_plane: ControlPlane) -> RunInCluster:
    """Return a run whose namespace, accounts and volume exist, and nothing else."""
    run = RunInCluster(make_cluster_run(), control_plane)
    run.kubectl.apply(yaml.safe_dump_all(prerequisites(run.run)))
    return run


def test_volume_binds_to_its_claim(namespaced: RunInCluster) -> None:
    def bound() -> dict[str, Any] | None:
        claim = namespaced.kubectl.get("pvc", "holdfast-fsx")
        return claim if claim and claim["status"]["phase"] == "Bound" else None

    claim = wait_until(bound, "claim bound")
    assert claim["spec"]["volumeName"] == f"{namespaced.kubectl.namespace}-holdfast-fsx"


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_server_takes_every_job(namespaced: RunInCluster, kind: Any) -> None:
    answer = namespaced.kubectl.apply(render(namespaced.run, kind), dry_run=True)
    assert answer.count("created (server dry run)") == len(job_objects(namespaced.run, kind))
    assert not namespaced.kubectl.list_objects("job"), "a dry run stores nothing"


def test_server_takes_the_examples_as_they_are(namespace: str) -> None:
    kubectl = Kubectl(namespace="")
    kubectl.run("create", "namespace", "training")
    for path, text in rendered_examples():
        assert "created" in kubectl.apply(text, dry_run=True), path


@pytest.mark.parametrize(
    "options", [{"queue": "team-a"}, {"hugepages_mib": 5120}, {"restart_in_place": True}]
)
def test_server_takes_every_option(namespaced: RunInCluster, make_cluster_run: Any, options: Any) -> None:
    run = make_cluster_run(kubernetes=options)
    assert "created" in namespaced.kubectl.apply(render(run), dry_run=True)


def test_applying_twice_changes_nothing(namespaced: RunInCluster) -> None:
    namespaced.apply()
    before = namespaced.job()["metadata"]
    namespaced.apply()
    after = namespaced.job()["metadata"]
    assert (after["uid"], after["generation"]) == (before["uid"], before["generation"])


@pytest.mark.parametrize("fault", BROKEN)
def test_server_refuses_broken_jobs(namespaced: RunInCluster, fault: str) -> None:
    edit, message = BROKEN[fault]
    job = job_objects(namespaced.run)[-1]
    if fault.startswith("changed"):
        namespaced.kubectl.apply(yaml.safe_dump(job))
    broken = copy.deepcopy(job)
    edit(broken)
    with pytest.raises(RunError, match=re.escape(message)):
        namespaced.kubectl.apply(yaml.safe_dump(broken), dry_run=True)
