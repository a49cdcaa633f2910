"""What the pods may do, and what they need beyond Pod Security's "baseline"."""

from __future__ import annotations

import re
from typing import Any

import pytest
import yaml

from k8s.kubectl import Kubectl
from k8s.manifests import job_objects
from k8s.network import control_name
from k8s.prerequisites import prerequisites
from tests.cluster.control_plane import ControlPlane
from tests.cluster.training_run import RunInCluster
from training.errors import RunError


def pod_of(job: dict[str, Any], name: str) -> dict[str, Any]:
    """Return the pod that the Job controller would make, as a manifest of its own."""
    template = job["spec"]["template"]
    metadata = {**template["metadata"], "name": name, "namespace": job["metadata"]["namespace"]}
    spec = {**template["spec"], "subdomain": ""}
    return {"apiVersion": "v1", "kind": "Pod", "metadata": metadata, "spec": spec}


def enforce(run: RunInCluster, level: str) -> None:
    """Make the namespace with this Pod Security level."""
    run.kubectl.apply(yaml.safe_dump_all(prerequisites(run.run)))
    label = f"pod-security.kubernetes.io/enforce={level}"
    Kubectl(namespace="").run("label", "namespace", run.kubectl.namespace, label, "--overwrite")


def test_efa_needs_exactly_ipc_lock_beyond_baseline(
    make_cluster_run: Any, control_plane: ControlPlane
) -> None:
    # GIVEN a run that keeps copies of its state on the nodes' own disks too
    run = RunInCluster(make_cluster_run(local_directory="/local"), control_plane)
    enforce(run, "baseline")
    trainer = pod_of(job_objects(run.run)[-1], "trainer")
    with pytest.raises(RunError) as refused:
        run.kubectl.apply(yaml.safe_dump(trainer), dry_run=True)
    violations = re.search(r'violates PodSecurity "baseline:latest": (.*)', str(refused.value))
    assert violations is not None
    assert violations[1] == (
        'non-default capabilities (container "trainer" must not include "IPC_LOCK" '
        "in securityContext.capabilities.add)"
    )


def test_all_pods_keep_baseline_where_nodes_lift_the_memory_lock_limit(
    make_cluster_run: Any, control_plane: ControlPlane
) -> None:
    run = RunInCluster(make_cluster_run(kubernetes={"lock_memory": "node"}), control_plane)
    enforce(run, "baseline")
    jobs = [
        manifest
        for kind in ("train", "prepare", "export")
        for manifest in job_objects(run.run, kind)
        if manifest["kind"] == "Job"
    ]
    for number, job in enumerate(jobs):
        answer = run.kubectl.apply(yaml.safe_dump(pod_of(job, f"pod-{number}")), dry_run=True)
        assert "created" in answer


def test_publisher_may_do_what_it_does_and_no_more(started: RunInCluster) -> None:
    outputs = started.run.outputs
    account = f"system:serviceaccount:{outputs.namespace}:{outputs.control_service_account}"
    job, control = f"jobs.batch/{started.name}", f"jobs.batch/{control_name(started.name)}"
    allowed = [("get", job), ("patch", job), ("get", control), ("delete", control)]
    refused = [
        ("delete", job),
        ("patch", control),
        ("list", "jobs.batch"),
        ("create", "jobs.batch"),
        ("get", "jobs.batch/other"),
        ("get", "secrets"),
        ("create", "pods"),
        ("create", "pods/exec"),
        ("patch", "nodes"),
    ]
    for verb, what in allowed:
        assert can_i(started, account, verb, what), (verb, what)
    for verb, what in refused:
        assert not can_i(started, account, verb, what), (verb, what)


def test_trainers_may_do_nothing_and_have_no_token(started: RunInCluster) -> None:
    outputs = started.run.outputs
    account = f"system:serviceaccount:{outputs.namespace}:{outputs.training_service_account}"
    for verb, what in [("get", f"jobs.batch/{started.name}"), ("list", "pods"), ("get", "secrets")]:
        assert not can_i(started, account, verb, what)
    for pod in started.running():
        assert not [volume for volume in pod["spec"]["volumes"] if "projected" in volume]


def can_i(run: RunInCluster, account: str, verb: str, what: str) -> bool:
    try:
        run.kubectl.run("auth", "can-i", verb, what, f"--as={account}")
    except RunError:
        return False
    return True
