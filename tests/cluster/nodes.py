"""Nodes without kubelets: Node objects with the capacity of the real ones, and what a kubelet would say.

One thread stands for all kubelets. It renews leases, starts the pods that the scheduler has bound and
ends the ones that are deleted, as a kubelet reports it. A lost node reports nothing any more.
"""

from __future__ import annotations

import datetime
import threading
from collections.abc import Mapping
from dataclasses import dataclass
from types import TracebackType
from typing import Any, Self

from eks_training.instance_types import INSTANCE_TYPES
from tests.cluster.control_plane import ApiError, ControlPlane
from tests.cluster.kubelet_logs import LogServer

ZONE, OTHER_ZONE = "us-west-2a", "us-west-2b"
EXIT_SIGTERM = 143
_TICK_SECONDS = 0.3


@dataclass(frozen=True, kw_only=True, slots=True)
class FakeNode:
    """A node as EKS would register it."""

    name: str
    labels: Mapping[str, str]
    taints: tuple[Mapping[str, str], ...] = ()
    capacity: Mapping[str, str]

    def manifest(self) -> dict[str, Any]:
        return {
            "apiVersion": "v1",
            "kind": "Node",
            "metadata": {"name": self.name, "labels": {**self.labels, "kubernetes.io/hostname": self.name}},
            "spec": {"taints": list(self.taints)},
        }


def gpu_node(name: str, *, instance_type: str = "p5.48xlarge", zone: str = ZONE) -> FakeNode:
    """Return a GPU node with what its kubelet and device plugins would offer."""
    instance = INSTANCE_TYPES[instance_type]
    return FakeNode(
        name=name,
        labels={**_place(instance_type, zone), "nvidia.com/gpu.present": "true"},
        taints=({"key": "nvidia.com/gpu", "value": "true", "effect": "NoSchedule"},),
        capacity={
            "cpu": f"{instance.allocatable_cpu_millicores}m",
            "memory": f"{instance.requestable_memory_mib}Mi",
            "pods": str(instance.max_pods),
            "ephemeral-storage": "1Ti",
            "nvidia.com/gpu": str(instance.gpus),
            "vpc.amazonaws.com/efa": str(instance.efa_interfaces),
        },
    )


def system_node(name: str, *, zone: str = ZONE) -> FakeNode:
    """Return an m7i.xlarge of the managed node group."""
    capacity = {"cpu": "3920m", "memory": "14Gi", "pods": "58", "ephemeral-storage": "80Gi"}
    return FakeNode(name=name, labels=_place("m7i.xlarge", zone), capacity=capacity)


class Kubelets:
    """Keeps nodes alive and their pods running until told otherwise."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._api = control_plane
        self._logs = LogServer(control_plane.directory)
        self._alive: set[str] = set()
        self._lost: set[str] = set()
        self._stop = threading.Event()
        self._thread = threading.Thread(target=self._loop, name="kubelets")
        self._failure: Exception | None = None

    def __enter__(self) -> Self:
        self._logs.__enter__()
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stop.set()
        self._thread.join()
        self._logs.__exit__(kind, error, trace)
        if self._failure is not None:
            raise self._failure

    def register(self, node: FakeNode) -> None:
        """Create a node that is ready."""
        self._api.request("POST", "/api/v1/nodes", node.manifest())
        self._report_ready(node.name, node.capacity)
        self._alive.add(node.name)

    def lose(self, name: str) -> None:
        """Cut a node off: it reports nothing, neither about itself nor about its pods."""
        self._lost.add(name)

    def recover(self, node: FakeNode) -> None:
        """Let a lost node report again."""
        self._report_ready(node.name, node.capacity)
        self._lost.discard(node.name)

    def exit(self, pod: Mapping[str, Any], code: int) -> None:
        """Report that the containers of a pod have ended with `code`."""
        now = _now()
        ended = {"exitCode": code, "reason": "Completed" if code == 0 else "Error"}
        statuses = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": False,
                "restartCount": 0,
                "state": {"terminated": {**ended, "startedAt": now, "finishedAt": now}},
            }
            for container in pod["spec"]["containers"]
        ]
        phase = "Succeeded" if code == 0 else "Failed"
        kept = [c for c in pod["status"].get("conditions", []) if c["type"] == "DisruptionTarget"]
        conditions = [*_conditions(ready=False), *kept]
        status = {"phase": phase, "containerStatuses": statuses, "conditions": conditions}
        self._api.merge(f"{_path(pod)}/status", {"status": status})

    def _loop(self) -> None:
        try:
            while not self._stop.wait(_TICK_SECONDS):
                for name in self._alive - self._lost:
                    self._renew_lease(name)
                for pod in self._api.request("GET", "/api/v1/pods")["items"]:
                    self._report(pod)
        except Exception as error:  # noqa: BLE001 - raised again in __exit__
            self._failure = error

    def _report(self, pod: dict[str, Any]) -> None:
        node = pod["spec"].get("nodeName")
        if node not in self._alive - self._lost:
            return
        phase = pod["status"]["phase"]
        try:
            if "deletionTimestamp" in pod["metadata"]:
                if phase not in ("Failed", "Succeeded"):
                    self.exit(pod, EXIT_SIGTERM)
                self._api.request("DELETE", _path(pod), {"gracePeriodSeconds": 0})
            elif phase == "Pending":
                self._start(pod)
        except ApiError as error:
            if error.code not in (404, 409):  # somebody else was quicker
                raise

    def _start(self, pod: dict[str, Any]) -> None:
        now = _now()
        statuses = [
            {
                "name": container["name"],
                "image": container["image"],
                "imageID": "",
                "ready": True,
                "started": True,
                "restartCount": 0,
                "state": {"running": {"startedAt": now}},
            }
            for container in pod["spec"]["containers"]
        ]
        status = {"phase": "Running", "conditions": _conditions(ready=True), "containerStatuses": statuses}
        self._api.merge(f"{_path(pod)}/status", {"status": status})

    def _report_ready(self, name: str, capacity: Mapping[str, str]) -> None:
        ready = {"type": "Ready", "status": "True", "reason": "KubeletReady", "lastHeartbeatTime": _now()}
        status = {
            "capacity": dict(capacity),
            "allocatable": dict(capacity),
            "conditions": [ready],
            "addresses": [{"type": "InternalIP", "address": "127.0.0.1"}],
            "daemonEndpoints": {"kubeletEndpoint": {"Port": self._logs.port}},
        }
        self._api.merge(f"/api/v1/nodes/{name}/status", {"status": status})
        self._renew_lease(name)

    def _renew_lease(self, name: str) -> None:
        leases = "/apis/coordination.k8s.io/v1/namespaces/kube-node-lease/leases"
        spec = {"holderIdentity": name, "leaseDurationSeconds": 40, "renewTime": _now(micro=True)}
        try:
            self._api.merge(f"{leases}/{name}", {"spec": spec})
        except ApiError as error:
            if error.code != 404:
                raise
            lease = {"apiVersion": "coordination.k8s.io/v1", "kind": "Lease", "metadata": {"name": name}}
            self._api.request("POST", leases, {**lease, "spec": spec})


def _place(instance_type: str, zone: str) -> dict[str, str]:
    return {"node.kubernetes.io/instance-type": instance_type, "topology.kubernetes.io/zone": zone}


def _conditions(*, ready: bool) -> list[dict[str, str]]:
    types = ("Ready", "ContainersReady", "PodScheduled", "Initialized")
    return [{"type": kind, "status": str(ready or kind == "PodScheduled")} for kind in types]


def _path(pod: Mapping[str, Any]) -> str:
    return f"/api/v1/namespaces/{pod['metadata']['namespace']}/pods/{pod['metadata']['name']}"


def _now(*, micro: bool = False) -> str:
    now = datetime.datetime.now(datetime.UTC)
    return now.strftime("%Y-%m-%dT%H:%M:%S.%fZ" if micro else "%Y-%m-%dT%H:%M:%SZ")
