"""Where the real scheduler puts unmodified manifests."""

from __future__ import annotations

import dataclasses
from functools import partial
from typing import Any

import yaml

from eks_training.device_plugins import device_plugins
from k8s.manifests import job_name, render
from k8s.network import control_name
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import FakeNode, Kubelets
from tests.cluster.training_run import RunInCluster
from tests.cluster.waiting import wait_until

P5_NODES = {"p5-a1", "p5-a2", "p5-a3"}


def node_of(pod: dict[str, Any]) -> str:
    return str(pod["spec"].get("nodeName", ""))


def test_one_training_pod_a_node_of_the_type_and_zone(started: RunInCluster) -> None:
    assert {node_of(pod) for pod in started.running()} == P5_NODES


def test_copies_on_the_nodes_disk_need_a_node_that_has_it(
    make_cluster_run: Any, control_plane: ControlPlane, kubelets: Kubelets, nodes: dict[str, FakeNode]
) -> None:
    # GIVEN a node whose kubelet lies on the root volume, not on the NVMe disks
    small = {**nodes["p5-a1"].capacity, "ephemeral-storage": "100Gi"}
    kubelets.recover(dataclasses.replace(nodes["p5-a1"], capacity=small))
    try:
        run = RunInCluster(make_cluster_run(local_directory="/local"), control_plane)
        run.apply()
        # THEN no pod is placed there, to be evicted when it writes
        assert {node_of(pod) for pod in run.wait_for_running(2)} == P5_NODES - {"p5-a1"}
        wait_until(lambda: [p for p in run.pods() if _unschedulable(p)], "third pod refused")
    finally:
        kubelets.recover(nodes["p5-a1"])


def test_a_pod_more_than_there_are_nodes_waits(started: RunInCluster, make_cluster_run: Any) -> None:
    # GIVEN all p5 nodes of the zone taken, a p5 in another zone and a node of another type free
    other = make_cluster_run(name="other")
    # WHEN one more run is applied
    started.kubectl.apply(render(other))
    # THEN none of its pods is placed
    name = job_name(other)
    pods = wait_until(lambda: [p for p in started.pods(name) if _unschedulable(p)], "pods refused")
    assert not any(node_of(pod) for pod in started.pods(name))
    assert "Insufficient nvidia.com/gpu" in str(pods[0]["status"]["conditions"])


def test_control_pod_runs_on_a_system_node_of_the_zone(started: RunInCluster) -> None:
    control = control_name(started.name)
    pods = wait_until(lambda: [p for p in started.pods(control) if node_of(p)], "control pod placed")
    assert [node_of(pod) for pod in pods] == ["system-a"]


def test_device_plugins_land_on_the_gpu_nodes_only(started: RunInCluster) -> None:
    plugins = device_plugins(instance_type="p5.48xlarge", region="us-west-2", url_suffix="amazonaws.com")
    names = [plugin["metadata"]["name"] for plugin in plugins]
    started.kubectl.apply(yaml.safe_dump_all([{**p, "metadata": _here(p, started)} for p in plugins]))
    for name in names:
        nodes = wait_until(partial(_daemon_nodes, started, name), f"{name} on 4 nodes")
        assert nodes == P5_NODES | {"p5-other-zone"}
    started.kubectl.run("delete", "daemonset", *names, "--wait=false")


def test_preparation_fits_beside_training(started: RunInCluster) -> None:
    started.kubectl.apply(render(started.run, "prepare"))
    name = job_name(started.run, "prepare")
    pods = wait_until(lambda: [p for p in started.pods(name) if node_of(p)], "preparation pod placed")
    assert node_of(pods[0]) in P5_NODES


def _here(manifest: dict[str, Any], run: RunInCluster) -> dict[str, Any]:
    return {**manifest["metadata"], "namespace": run.kubectl.namespace}


def _daemon_nodes(run: RunInCluster, name: str) -> set[str]:
    pods = run.kubectl.list_objects("pod", selector=f"app.kubernetes.io/name={name}")
    nodes = {node_of(pod) for pod in pods}
    return nodes if len(nodes) == 4 and all(nodes) else set()


def _unschedulable(pod: dict[str, Any]) -> bool:
    return any(c.get("reason") == "Unschedulable" for c in pod["status"].get("conditions", ()))
