from __future__ import annotations

import json
from collections.abc import Callable
from typing import Any

import pytest

from k8s import logs
from k8s.kubectl import Kubectl
from k8s.publish import STATUS_ANNOTATION
from k8s.report import cluster_report

KUBECTL = Kubectl(namespace="training")
JOB: dict[str, Any] = {
    "metadata": {
        "name": "llama3-8b-1",
        "labels": {"holdfast/run": "llama3-8b", "app.kubernetes.io/component": "trainer"},
        "annotations": {
            STATUS_ANNOTATION: json.dumps({"steps": 10, "ranks": {"0": "node-a", "1": "node-b"}})
        },
    },
    "spec": {},
    "status": {"ready": 2},
}


def pod(name: str, *, index: int, node: str, created: str, **metadata: Any) -> dict[str, Any]:
    return {
        "metadata": {
            "name": name,
            "creationTimestamp": created,
            "annotations": {"batch.kubernetes.io/job-completion-index": str(index)},
            **metadata,
        },
        "spec": {"nodeName": node},
        "status": {"phase": "Running"},
    }


@pytest.fixture
def replaced_pod(kubectl_answers: Callable[..., None]) -> Callable[..., None]:
    """A run whose index 0 has a pod that is still going, beside its replacement on the same node."""
    going = pod(
        "a-z",
        index=0,
        node="node-a",
        created="2026-07-01T00:00:00Z",
        deletionTimestamp="2026-07-01T01:00:00Z",
    )
    new = pod("a-b", index=0, node="node-a", created="2026-07-01T01:00:30Z")
    other = pod("b-a", index=1, node="node-b", created="2026-07-01T00:00:00Z")
    kubectl_answers("job", JOB)
    kubectl_answers("pod", {"items": [other, new, going]})
    return kubectl_answers


@pytest.mark.usefixtures("replaced_pod")
def test_whoever_may_not_see_nodes_sees_the_rest() -> None:
    report = cluster_report(KUBECTL, "llama3-8b-1")
    assert [pod.node_ready for pod in report.pods] == [None, None, None]
    assert [pod.ranks for pod in report.pods] == [[0], [0], [1]]


def test_nodes_that_are_not_ready_are_told(replaced_pod: Callable[..., None]) -> None:
    node = {
        "metadata": {"name": "node-b"},
        "status": {"conditions": [{"type": "Ready", "status": "Unknown"}]},
    }
    replaced_pod("node", {"items": [node]})
    assert [pod.node_ready for pod in cluster_report(KUBECTL, "llama3-8b-1").pods] == [None, None, False]


@pytest.mark.usefixtures("replaced_pod")
def test_pods_are_in_order_of_index_and_age() -> None:
    pods = cluster_report(KUBECTL, "llama3-8b-1").pods
    assert [(pod.name, pod.phase) for pod in pods] == [
        ("a-z", "Terminating"),
        ("a-b", "Running"),
        ("b-a", "Running"),
    ]


@pytest.mark.usefixtures("replaced_pod")
@pytest.mark.parametrize(("rank", "index", "name"), [(None, 0, "a-b"), (0, None, "a-b"), (1, None, "b-a")])
def test_logs_are_those_of_the_newest_pod(rank: int | None, index: int | None, name: str) -> None:
    pods = cluster_report(KUBECTL, "llama3-8b-1").pods
    assert logs._pod_of(pods, rank=rank, index=index).name == name
