"""One run in the cluster, as tests look at it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from k8s.jobs import State, state_of
from k8s.kubectl import Kubectl
from k8s.manifests import job_name, render
from k8s.run import Run
from tests.cluster.control_plane import ControlPlane
from tests.cluster.waiting import LONGEST_WAIT_SECONDS, wait_until


class RunInCluster:
    """A rendered run, its Job and its pods."""

    def __init__(self, run: Run, control_plane: ControlPlane) -> None:
        self.run, self.name = run, job_name(run)
        self.kubectl = Kubectl(namespace=run.outputs.namespace)
        self._api = control_plane

    def apply(self) -> str:
        """Apply exactly what `k8s render --with-prerequisites` prints."""
        return self.kubectl.apply(render(self.run, with_prerequisites=True))

    def job(self) -> dict[str, Any]:
        path = f"/apis/batch/v1/namespaces/{self.kubectl.namespace}/jobs/{self.name}"
        return dict(self._api.request("GET", path))

    def pods(self, job: str = "") -> list[dict[str, Any]]:
        """Return the pods of a Job, by default the training Job, in order of completion index."""
        path = f"/api/v1/namespaces/{self.kubectl.namespace}/pods"
        selector = f"batch.kubernetes.io%2Fjob-name%3D{job or self.name}"
        pods = self._api.request("GET", f"{path}?labelSelector={selector}")["items"]
        return sorted(pods, key=lambda pod: pod["metadata"]["name"])

    def pod(self, index: int) -> dict[str, Any]:
        """Return the pod of an index that is neither finished nor going."""
        return next(pod for pod in self.running() if index_of(pod) == index)

    def running(self) -> list[dict[str, Any]]:
        return [
            pod
            for pod in self.pods()
            if pod["status"]["phase"] == "Running" and "deletionTimestamp" not in pod["metadata"]
        ]

    def wait_for_running(self, count: int, *, seconds: float = LONGEST_WAIT_SECONDS) -> list[dict[str, Any]]:
        """Wait until as many pods run and the Job says so, and return them.

        The Job controller counts once a second: a Job may say "pending" of pods that run.
        """

        def counted() -> list[dict[str, Any]]:
            pods = self.running()
            return pods if len(pods) == count == self.job().get("status", {}).get("ready", 0) else []

        return wait_until(counted, f"{count} pods run", seconds=seconds)

    def wait_for_state(self, state: State) -> None:
        """Wait until the Job's status says what its pods do: its controller counts once a second."""
        wait_until(lambda: state_of(self.job()) == state, f"the Job is {state}")

    def wait_for_replacement(
        self, pod: dict[str, Any], *, seconds: float = LONGEST_WAIT_SECONDS
    ) -> dict[str, Any]:
        """Wait until another pod of the same index runs, and return it."""
        uid, index = pod["metadata"]["uid"], index_of(pod)

        def replacement() -> dict[str, Any] | None:
            others = (p for p in self.running() if p["metadata"]["uid"] != uid)
            return next((p for p in others if index_of(p) == index), None)

        return wait_until(replacement, f"replacement of index {index}", seconds=seconds)

    def wait_for_job(self, check: Callable[[dict[str, Any]], Any], what: str) -> dict[str, Any]:
        """Wait until the Job's status fulfils `check`, and return that status."""
        return wait_until(
            lambda: status if check(status := self.job().get("status", {})) else None, f"Job status: {what}"
        )


def index_of(pod: dict[str, Any]) -> int:
    return int(pod["metadata"]["annotations"]["batch.kubernetes.io/job-completion-index"])


def has_condition(status: dict[str, Any], kind: str) -> bool:
    return any(c["type"] == kind and c["status"] == "True" for c in status.get("conditions", ()))
