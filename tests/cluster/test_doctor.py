"""The doctor's checks of a deployed cluster, against a real API server."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import pytest
import yaml

from eks_training.device_plugins import device_plugins
from k8s.after_deploy import DeployedCluster
from k8s.examples import P5_RECIPE
from k8s.findings import Finding
from k8s.kubectl import Kubectl
from k8s.prerequisites import prerequisites
from k8s.run import Run
from k8s.smoke import run_smoke, smoke_objects
from tests.cluster.command_line import k8s, write_outputs
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import FakeNode, Kubelets
from tests.cluster.training_run import RunInCluster
from tests.cluster.waiting import wait_until

SYSTEM = Kubectl(namespace="kube-system")


@pytest.fixture
def plugins() -> Iterator[list[str]]:
    """Install the DaemonSets of a deployed cluster; return their names."""
    manifests = device_plugins(instance_type="p5.48xlarge", region="us-west-2", url_suffix="amazonaws.com")
    csi = json.loads(json.dumps(manifests[0]).replace("nvidia-device-plugin", "fsx-csi-node"))
    names = [manifest["metadata"]["name"] for manifest in [*manifests, csi]]
    SYSTEM.apply(yaml.safe_dump_all([*manifests, csi]))
    wait_until(lambda: all(_ready(name) for name in names), "plugins ready")
    yield names
    SYSTEM.run("delete", "daemonset", *names)
    wait_until(lambda: not SYSTEM.list_objects("pod"), "plugins gone")


@pytest.fixture
def cluster(make_cluster_run: Any, kubelets: Kubelets) -> DeployedCluster:
    run: Run = make_cluster_run()
    kubectl = Kubectl(namespace=run.outputs.namespace)
    kubectl.apply(yaml.safe_dump_all(prerequisites(run)))
    claim = run.outputs.persistent_volume_claim
    wait_until(lambda: kubectl.get("pvc", claim)["status"]["phase"] == "Bound", "claim bound")  # type: ignore[index]
    return DeployedCluster(outputs=run.outputs, kubectl=kubectl, run=run)


def findings(cluster: DeployedCluster) -> list[Finding]:
    return [finding for check in cluster.checks() for finding in check()]


def failures(cluster: DeployedCluster) -> list[str]:
    return [finding.message for finding in findings(cluster) if finding.level == "FAIL"]


def test_a_sound_cluster(cluster: DeployedCluster, plugins: list[str], tmp_path: Path) -> None:
    outside_ecr = dataclasses.replace(
        cluster.outputs, trainer_image="registry.example/t:1", control_image="registry.example/c:1"
    )
    outputs = write_outputs(tmp_path / "outputs.json", outside_ecr)
    done = k8s("doctor", P5_RECIPE, "--outputs", outputs, "--json")
    found = json.loads(done.stdout)
    assert [finding for finding in found if finding["level"] == "FAIL"] == []
    assert {finding["name"] for finding in found} >= {"plugin", "nodes", "allocatable", "volume", "image"}
    assert done.returncode == 1, "images outside ECR are a warning"


def test_an_empty_cluster_names_all_that_is_missing(cluster: DeployedCluster) -> None:
    cluster.kubectl.run("delete", "serviceaccount", cluster.outputs.control_service_account)
    found = failures(cluster)
    assert "nvidia-device-plugin is not installed: GPUs are not offered without it" in found
    assert "fsx-csi-node is not installed: the shared file system cannot be mounted" in found
    account = cluster.outputs.control_service_account
    assert f"{account} is not in {cluster.kubectl.namespace}" in found


def test_a_plugin_that_lands_nowhere(cluster: DeployedCluster, plugins: list[str]) -> None:
    selector = {"spec": {"template": {"spec": {"nodeSelector": {"nvidia.com/gpu.present": "yes"}}}}}
    SYSTEM.patch("daemonset", plugins[1], selector)
    message = f"{plugins[1]}: 0 of 0 ready: NCCL would fall back to TCP without a word"
    wait_until(lambda: message in failures(cluster), "plugin with DESIRED=0 reported")


def test_a_missing_node_and_an_unhealthy_gpu(
    cluster: DeployedCluster, control_plane: ControlPlane, nodes: dict[str, FakeNode]
) -> None:
    # GIVEN one more spare than there are nodes, and a device plugin that has withdrawn a GPU
    outputs = dataclasses.replace(cluster.outputs, spares=2)
    path = "/api/v1/nodes/p5-a2/status"
    control_plane.merge(path, {"status": {"allocatable": {"nvidia.com/gpu": "7"}}})
    try:
        found = failures(dataclasses.replace(cluster, outputs=outputs))
    finally:
        control_plane.merge(path, {"status": {"allocatable": {"nvidia.com/gpu": "8"}}})
    assert "p5.48xlarge nodes ready in us-west-2a: 3, needed 4" in found
    assert "p5-a2: nvidia.com/gpu is 7, needed 8" in found


def test_another_cluster_than_the_outputs_say(cluster: DeployedCluster) -> None:
    outputs = dataclasses.replace(cluster.outputs, kubernetes_version="1.33")
    found = failures(dataclasses.replace(cluster, outputs=outputs))
    assert "the API server is 1.36, the outputs say 1.33" in found


def test_server_takes_the_smoke_job(cluster: DeployedCluster) -> None:
    assert cluster.run is not None
    answer = cluster.kubectl.apply(yaml.safe_dump_all(smoke_objects(cluster.run)), dry_run=True)
    assert answer.count("created") == 3


def _ready(name: str) -> bool:
    found = SYSTEM.get("daemonset", name)
    status = found["status"] if found else {}
    return bool(0 < status.get("desiredNumberScheduled", 0) == status.get("numberReady", 0))


@pytest.mark.parametrize(
    ("code", "message"),
    [(0, "the Job ended without a result"), (1, "FailedIndexes: Job has failed indexes; pods: smoke-")],
)
def test_smoke_job_is_judged_and_removed(
    cluster: DeployedCluster, kubelets: Kubelets, control_plane: ControlPlane, code: int, message: str
) -> None:
    assert cluster.run is not None
    in_cluster = RunInCluster(cluster.run, control_plane)
    in_cluster.name = smoke_objects(cluster.run)[-1]["metadata"]["name"]
    with ThreadPoolExecutor(1) as executor:
        judged = executor.submit(lambda: list(run_smoke(cluster.kubectl, in_cluster.run)))
        for pod in in_cluster.wait_for_running(2):
            kubelets.exit(pod, code)
        (finding,) = judged.result(timeout=90)
    assert finding.level == "FAIL"
    assert message in finding.message
    assert cluster.kubectl.get("job", in_cluster.name) is None
