"""What the real Job controller makes of the pods' ends."""

from __future__ import annotations

from typing import Any

import pytest

from tests.cluster.control_plane import ApiError, ControlPlane
from tests.cluster.nodes import FakeNode, Kubelets
from tests.cluster.training_run import RunInCluster, has_condition, index_of
from tests.cluster.waiting import wait_until
from training.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY, EXIT_SAME_STEP

# the first delay of an index is 10 s; one that all indexes share would be 40 s after three failures
ONE_DELAY_SECONDS = 30.0


def test_each_index_has_a_retry_delay_of_its_own(started: RunInCluster, kubelets: Kubelets) -> None:
    pods = started.running()
    for pod in pods:
        kubelets.exit(pod, EXIT_RETRY)
    for pod in pods:
        started.wait_for_replacement(pod, seconds=ONE_DELAY_SECONDS)
    assert not has_condition(started.job()["status"], "Failed")


@pytest.mark.parametrize("code", [EXIT_CONFIG, EXIT_SAME_STEP])
def test_pointless_retries_end_the_job(started: RunInCluster, kubelets: Kubelets, code: int) -> None:
    kubelets.exit(started.pod(1), code)
    status = started.wait_for_job(lambda status: has_condition(status, "Failed"), "failed")
    reasons = {condition["reason"] for condition in status["conditions"]}
    assert "PodFailurePolicy" in reasons
    assert f"exit code {code}" in str(status["conditions"])
    wait_until(lambda: not started.running(), "other pods stopped")


def test_done_needs_no_spare(started: RunInCluster, kubelets: Kubelets) -> None:
    # WHEN two of three pods are done
    for index in (0, 2):
        kubelets.exit(started.pod(index), EXIT_DONE)
    # THEN the Job is complete, and the pods that were done stay for their logs
    status = started.wait_for_job(lambda status: has_condition(status, "Complete"), "complete")
    assert status["completedIndexes"] == "0,2"
    wait_until(lambda: not started.running(), "spare stopped")
    phases = sorted(pod["status"]["phase"] for pod in started.pods() if index_of(pod) != 1)
    assert phases == ["Succeeded", "Succeeded"]


def test_a_deleted_pod_is_never_counted_as_done(started: RunInCluster) -> None:
    # the process was told to stop and ends with 143
    deleted = started.pod(0)
    started.kubectl.run("delete", "pod", deleted["metadata"]["name"], "--wait=false")
    started.wait_for_replacement(deleted)
    status = started.job()["status"]
    assert not status.get("completedIndexes")
    assert not status.get("succeeded")


def test_eviction_is_refused_while_the_budget_stands(
    started: RunInCluster, control_plane: ControlPlane
) -> None:
    with pytest.raises(ApiError, match="disruption budget") as caught:
        evict(control_plane, started.pod(0))
    assert caught.value.code == 429


def test_disruption_is_not_charged(started: RunInCluster, control_plane: ControlPlane) -> None:
    # GIVEN an operator who insists
    started.kubectl.run("delete", "poddisruptionbudget", started.name)
    evicted = started.pod(1)
    # WHEN the pod is evicted
    wait_until(lambda: _evicted(control_plane, evicted), "eviction taken")
    # THEN it is replaced and no failure is counted
    started.wait_for_replacement(evicted)
    assert started.job()["status"].get("failed", 0) == 0


def test_a_lost_nodes_index_is_freed_by_a_patch_of_the_pods_status(
    started: RunInCluster, control_plane: ControlPlane, kubelets: Kubelets, nodes: dict[str, FakeNode]
) -> None:
    lost = started.pod(0)
    node = lost["spec"]["nodeName"]
    # WHEN a node vanishes
    kubelets.lose(node)
    try:
        stuck = wait_until(lambda: _disrupted(started, lost), "pod of the lost node terminating")
        # THEN its pod hangs: a dead kubelet reports no end, and the Job waits for one
        assert stuck["status"]["phase"] == "Running"
        started.wait_for_job(lambda status: status.get("terminating") == 1, "waits for the lost pod")
        # WHEN a person says that it is dead, and the node is back or replaced
        path = f"/api/v1/namespaces/{started.kubectl.namespace}/pods/{stuck['metadata']['name']}"
        control_plane.merge(f"{path}/status", {"status": {"phase": "Failed", "reason": "NodeLost"}})
    finally:
        kubelets.recover(nodes[node])
    # THEN the index gets a new pod, and no failure is counted
    started.wait_for_replacement(lost)
    assert started.job()["status"].get("failed", 0) == 0


def evict(control_plane: ControlPlane, pod: dict[str, Any]) -> None:
    metadata = pod["metadata"]
    path = f"/api/v1/namespaces/{metadata['namespace']}/pods/{metadata['name']}/eviction"
    body = {"apiVersion": "policy/v1", "kind": "Eviction", "metadata": {"name": metadata["name"]}}
    control_plane.request("POST", path, body)


def _evicted(control_plane: ControlPlane, pod: dict[str, Any]) -> bool:
    try:
        evict(control_plane, pod)
    except ApiError as error:
        if error.code == 429:  # the deleted budget is still cached
            return False
        raise
    return True


def _disrupted(run: RunInCluster, pod: dict[str, Any]) -> dict[str, Any] | None:
    now = next(p for p in run.pods() if p["metadata"]["uid"] == pod["metadata"]["uid"])
    going = "deletionTimestamp" in now["metadata"]
    return now if going and has_condition(now["status"], "DisruptionTarget") else None
