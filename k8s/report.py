"""What is known about a run: from its Job in the cluster, or from its directory."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from k8s import jobs, trainer
from k8s.goodput import Goodput
from k8s.kubectl import Kubectl
from k8s.pod import RUN_LABEL
from k8s.progress import EventTail, Progress, Restarts, RunStatus
from k8s.publish import STATUS_ANNOTATION
from training.config import load_recipe
from training.errors import EXIT_CONFIG, EXIT_SAME_STEP, EXIT_STOPPED, ConfigError, RunError


@dataclass(frozen=True, kw_only=True, slots=True)
class PodStatus:
    """One pod of the training Job."""

    index: int
    name: str
    created: str
    """When it was made, RFC 3339: an index can have an old pod that is still going and a new one."""
    node: str
    node_ready: bool | None
    phase: str
    role: str
    """training, spare, or empty where that isn't known yet."""
    ranks: list[int]
    restarts: int
    """Container restarts inside the pod."""
    reason: str = ""
    """Why it isn't running, where Kubernetes says so."""


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """All that `status` shows."""

    run: str
    job: str = ""
    component: str = trainer.COMPONENT
    """What the Job does: trainer, prepare or export."""
    state: str = ""
    failure: str = ""
    pods: list[PodStatus] = field(default_factory=list)
    training: RunStatus | None = None
    """None until the run has written its first event."""


def directory_reader(name: str, run_dir: Path, recipe_path: Path) -> Callable[[], Report]:
    """Return a function that reports on a run from its directory, reading only what is new."""
    recipe = load_recipe(recipe_path)
    if not run_dir.is_dir():
        raise ConfigError.of("--run-dir", str(run_dir), "is no directory", "give the directory of the run")
    tail, goodput = EventTail(run_dir), Goodput(run_dir)
    progress = Progress(steps=recipe.training.steps, pods=recipe.job.launchers)

    def read() -> Report:
        for event in tail.read():
            progress.add(event)
        status = progress.status(goodput_percent=goodput.percent())
        begun = status if status.updated else None
        return Report(run=name, training=begun, state=state_of_events(status))

    return read


def state_of_events(status: RunStatus) -> str:
    """Return what a run is doing, told from its events alone."""
    if status.done:
        return "complete"
    if status.exit_code in (EXIT_CONFIG, EXIT_SAME_STEP):
        return "failed"
    if status.exit_code == EXIT_STOPPED:
        return "stopped"
    return "running" if status.updated else "pending"


def cluster_report(kubectl: Kubectl, name: str) -> Report:
    """Report on the Job that `name` means."""
    job = jobs.find_job(kubectl, name)
    metadata = job["metadata"]
    training = published_status(job)
    pods = kubectl.list_objects(
        "pod", selector=jobs.selector_of(metadata["name"], component=jobs.component_of(job))
    )
    ready = _ready_nodes(kubectl)
    return Report(
        run=metadata["labels"][RUN_LABEL],
        job=metadata["name"],
        component=jobs.component_of(job),
        state=jobs.state_of(job),
        failure=jobs.failure_of(job),
        pods=sorted((_pod_status(pod, training, ready) for pod in pods), key=lambda p: (p.index, p.created)),
        training=training,
    )


def published_status(job: dict[str, Any]) -> RunStatus | None:
    """Return what the control pod has last written into a Job."""
    text = job["metadata"].get("annotations", {}).get(STATUS_ANNOTATION)
    if not text:
        return None
    values = json.loads(text)
    restarts = Restarts(**_known(Restarts, values.get("restarts", {})))
    return RunStatus(**{**_known(RunStatus, values), "restarts": restarts})


def _known(kind: type[RunStatus | Restarts], values: dict[str, Any]) -> dict[str, Any]:
    """Leave out fields that only the control image of another release knows."""
    names = {field.name for field in dataclasses.fields(kind)}
    return {name: value for name, value in values.items() if name in names}


def _ready_nodes(kubectl: Kubectl) -> dict[str, bool]:
    """Return which nodes are ready; nothing for somebody who may not see nodes: they are cluster-wide."""
    try:
        nodes = kubectl.list_objects("node")
    except RunError:
        return {}
    return {node["metadata"]["name"]: jobs.is_true(node, "Ready") for node in nodes}


def _pod_status(pod: dict[str, Any], training: RunStatus | None, ready: dict[str, bool]) -> PodStatus:
    node = pod["spec"].get("nodeName", "")
    ranks = [int(rank) for rank, place in training.ranks.items() if place == node] if training else []
    known = training is not None and training.ranks and node
    containers = pod["status"].get("containerStatuses", [])
    return PodStatus(
        index=int(pod["metadata"].get("annotations", {}).get(trainer.INDEX_ANNOTATION, 0)),
        name=pod["metadata"]["name"],
        created=str(pod["metadata"]["creationTimestamp"]),
        node=node,
        node_ready=ready.get(node),
        phase="Terminating" if "deletionTimestamp" in pod["metadata"] else pod["status"]["phase"],
        role=("training" if ranks else "spare") if known else "",
        ranks=ranks,
        restarts=sum(container["restartCount"] for container in containers),
        reason=_reason(pod),
    )


def _reason(pod: dict[str, Any]) -> str:
    for condition in pod["status"].get("conditions", []):
        if condition["type"] == "DisruptionTarget" and condition["status"] == "True":
            return str(condition.get("reason", ""))
        if condition["type"] == "PodScheduled" and condition["status"] == "False":
            return str(condition.get("message", ""))
    for container in pod["status"].get("containerStatuses", []):
        state = container["state"]
        if "waiting" in state:
            return str(state["waiting"].get("reason", ""))
        if "terminated" in state:
            return f"exit {state['terminated']['exitCode']}"
    return ""
