"""Checks of a deployed cluster, through the Kubernetes API, before money is spent on a run."""

from __future__ import annotations

import json
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from typing import Any

from eks_training.instance_types import INSTANCE_TYPES, InstanceType
from k8s import jobs
from k8s.control import GPU_NODE_LABEL
from k8s.findings import Check, Finding, at_least, fail, ok, warn
from k8s.kubectl import Kubectl
from k8s.outputs import StackOutputs
from k8s.quantity import parse_quantity
from k8s.run import Run

_DAEMON_SETS = {
    "nvidia-device-plugin": "GPUs are not offered without it",
    "aws-efa-k8s-device-plugin": "NCCL would fall back to TCP without a word",
    "fsx-csi-node": "the shared file system cannot be mounted",
}
_SYSTEM_NAMESPACE = "kube-system"


@dataclass(frozen=True, kw_only=True, slots=True)
class DeployedCluster:
    """A cluster that `cdk deploy` has made."""

    outputs: StackOutputs
    kubectl: Kubectl
    run: Run | None = None
    """A run that is to fit; None where no recipe was given."""

    @property
    def instance(self) -> InstanceType:
        return INSTANCE_TYPES[self.outputs.instance_type]

    def checks(self) -> list[Check]:
        checks: list[Callable[[DeployedCluster], Iterator[Finding]]] = [
            check_version,
            check_daemon_sets,
            check_nodes,
            check_system_nodes,
            check_namespace,
        ]
        return [partial(check, self) for check in checks]

    def training_nodes(self) -> list[dict[str, Any]]:
        zone = f"topology.kubernetes.io/zone={self.outputs.availability_zone}"
        kind = f"node.kubernetes.io/instance-type={self.outputs.instance_type}"
        return self.kubectl.list_objects("node", selector=f"{kind},{zone}")


def check_version(cluster: DeployedCluster) -> Iterator[Finding]:
    server = json.loads(cluster.kubectl.run("version", "--output=json"))["serverVersion"]
    version = f"{server['major']}.{server['minor'].rstrip('+')}"
    if version == cluster.outputs.kubernetes_version:
        yield ok("kubernetes", server["gitVersion"])
    else:
        message = f"the API server is {version}, the outputs say {cluster.outputs.kubernetes_version}"
        yield fail("kubernetes", message, "use this cluster's kubeconfig context, or deploy again")


def check_daemon_sets(cluster: DeployedCluster) -> Iterator[Finding]:
    """A plugin whose selector or toleration does not match has DESIRED=0 and reports no error."""
    kubectl = Kubectl(namespace=_SYSTEM_NAMESPACE, context=cluster.kubectl.context)
    for name, consequence in _DAEMON_SETS.items():
        found = kubectl.get("daemonset", name)
        if found is None:
            yield fail("plugin", f"{name} is not installed: {consequence}", "run `cdk deploy --all`")
            continue
        desired = found["status"].get("desiredNumberScheduled", 0)
        ready = found["status"].get("numberReady", 0)
        message = f"{name}: {ready} of {desired} ready"
        if not desired:
            fix = "compare its nodeSelector and tolerations with the nodes' labels and taints"
            yield fail("plugin", f"{message}: {consequence}", fix)
        elif ready < desired:
            fix = f"kubectl -n {_SYSTEM_NAMESPACE} describe daemonset {name}"
            yield warn("plugin", message, fix)
        else:
            yield ok("plugin", message)


def check_nodes(cluster: DeployedCluster) -> Iterator[Finding]:
    """Check that all GPU nodes have joined and offer what the table says."""
    outputs = cluster.outputs
    nodes = cluster.training_nodes()
    ready = [node for node in nodes if jobs.is_true(node, "Ready")]
    fix = (
        "look at the Auto Scaling group's activities; a node that runs but has not joined: access entry, "
        "service CIDR, subnet routes (docs/troubleshooting.md)"
    )
    wanted = outputs.nodes + outputs.spares
    what = f"{outputs.instance_type} nodes ready in {outputs.availability_zone}"
    yield at_least("nodes", what, have=len(ready), need=wanted, fix=fix)
    for node in ready:
        yield from _allocatable_findings(cluster, node)


def _allocatable_findings(cluster: DeployedCluster, node: dict[str, Any]) -> Iterator[Finding]:
    name, offered = node["metadata"]["name"], node["status"]["allocatable"]
    short = {
        resource: (have, need)
        for resource, need in _needed(cluster).items()
        if (have := parse_quantity(offered.get(resource, "0"))) < need
    }
    for resource, (have, need) in short.items():
        message = f"{name}: {resource} is {have:g}, needed {need:g}"
        yield fail("allocatable", message, _RESOURCE_FIXES.get(resource, "use another instance type"))
    if not short:
        devices = f"{cluster.instance.gpus} GPUs, {cluster.instance.efa_interfaces} EFA devices"
        yield ok("allocatable", f"{name}: {devices}, memory and CPUs for a trainer pod")
    unhealthy = [c["type"] for c in node["status"]["conditions"] if _is_bad(c)]
    if unhealthy:
        fix = f"kubectl describe node {name}; replace it if it stays"
        yield fail("node health", f"{name}: {', '.join(unhealthy)}", fix)


_RESOURCE_FIXES = {
    "nvidia.com/gpu": "an unhealthy GPU lowers it: look at the device plugin's log, replace the node",
    "vpc.amazonaws.com/efa": "compare the node's network interfaces with the table; see the EFA plugin's log",
    "hugepages-2Mi": "set kubernetes.hugepages_mib = 0: the node preallocates fewer",
}
_NODE_MONITORING = (
    "AcceleratedHardwareReady",
    "NetworkingReady",
    "StorageReady",
    "KernelReady",
    "ContainerRuntimeReady",
)


def _is_bad(condition: dict[str, Any]) -> bool:
    return condition["type"] in _NODE_MONITORING and condition["status"] == "False"


def _needed(cluster: DeployedCluster) -> dict[str, float]:
    instance = cluster.instance
    needed: dict[str, float] = {
        "nvidia.com/gpu": instance.gpus,
        "vpc.amazonaws.com/efa": instance.efa_interfaces,
    }
    if cluster.run is not None:
        resources = cluster.run.resources
        needed["memory"] = resources.memory_gib * 2**30
        needed["cpu"] = resources.cpus
        if resources.hugepages_mib:
            needed["hugepages-2Mi"] = resources.hugepages_mib * 2**20
    return needed


def check_system_nodes(cluster: DeployedCluster) -> Iterator[Finding]:
    nodes = cluster.kubectl.list_objects("node", selector=f"!{GPU_NODE_LABEL}")
    ready = [node for node in nodes if jobs.is_true(node, "Ready")]
    fix = "look at the managed node group: the control pods run there"
    yield at_least("system nodes", "ready", have=len(ready), need=1, fix=fix)


def check_namespace(cluster: DeployedCluster) -> Iterator[Finding]:
    """Check what a Job names: namespace, service accounts, volume claim."""
    outputs, kubectl = cluster.outputs, cluster.kubectl
    fix = "run `cdk deploy --all`, or apply `k8s render --with-prerequisites`"
    for account in (outputs.training_service_account, outputs.control_service_account):
        if kubectl.get("serviceaccount", account) is None:
            yield fail("service account", f"{account} is not in {outputs.namespace}", fix)
    claim = kubectl.get("persistentvolumeclaim", outputs.persistent_volume_claim)
    if claim is None:
        yield fail("volume", f"no claim {outputs.persistent_volume_claim} in {outputs.namespace}", fix)
    elif claim["status"]["phase"] != "Bound":
        hint = f"kubectl -n {outputs.namespace} describe pvc {outputs.persistent_volume_claim}"
        yield fail("volume", f"claim {outputs.persistent_volume_claim} is {claim['status']['phase']}", hint)
    else:
        yield ok("volume", f"claim {outputs.persistent_volume_claim} is bound")
