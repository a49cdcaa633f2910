"""One control plane and its nodes for all tests of this folder, a namespace for each test."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from k8s.examples import P5_RECIPE, SAMPLE_OUTPUTS
from k8s.kubectl import Kubectl
from k8s.outputs import load_outputs
from k8s.run import Run, make_run
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import OTHER_ZONE, FakeNode, Kubelets, gpu_node, system_node
from tests.cluster.training_run import RunInCluster
from tests.cluster.waiting import LONGEST_WAIT_SECONDS, wait_until
from training.checkpoint_config import LocalConfig
from training.config import load_recipe

NODES = (
    gpu_node("p5-a1"),
    gpu_node("p5-a2"),
    gpu_node("p5-a3"),
    gpu_node("p5-other-zone", zone=OTHER_ZONE),
    gpu_node("g6e-a1", instance_type="g6e.48xlarge"),
    system_node("system-a"),
    system_node("system-b", zone=OTHER_ZONE),
)


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Give the tests of this folder time for two waits in a row."""
    for item in items:
        if item.path.parent == Path(__file__).parent:
            item.add_marker(pytest.mark.timeout(3 * LONGEST_WAIT_SECONDS))


@pytest.fixture(scope="session")
def control_plane(tmp_path_factory: pytest.TempPathFactory) -> Iterator[ControlPlane]:
    with ControlPlane(tmp_path_factory.mktemp("control-plane")) as running:
        yield running
        running.check()


@pytest.fixture(scope="session")
def kubelets(control_plane: ControlPlane) -> Iterator[Kubelets]:
    with Kubelets(control_plane) as running:
        for node in NODES:
            running.register(node)
        wait_until(lambda: _untainted(control_plane), "nodes without not-ready taints")
        yield running


@pytest.fixture
def nodes() -> dict[str, FakeNode]:
    return {node.name: node for node in NODES}


@pytest.fixture(scope="session")
def _numbers() -> Iterator[int]:
    return itertools.count()


@pytest.fixture
def namespace(control_plane: ControlPlane, kubelets: Kubelets, _numbers: Iterator[int]) -> Iterator[str]:
    """Return the name of a namespace that does not exist yet; the nodes are free afterwards."""
    name = f"test-{next(_numbers)}"
    yield name
    kubectl = Kubectl(namespace=name)
    kubectl.run("delete", "job,pod", "--all", "--wait=false")
    wait_until(lambda: not kubectl.list_objects("pod"), f"no pods in {name}")


@pytest.fixture(autouse=True)
def kubectl_environment(control_plane: ControlPlane, monkeypatch: pytest.MonkeyPatch) -> None:
    """Let kubectl find the API server, as it would on an operator's machine."""
    monkeypatch.setenv("KUBECTL", str(control_plane.programs["kubectl"]))
    monkeypatch.setenv("KUBECONFIG", str(control_plane.kubeconfig()))
    monkeypatch.setenv("HOME", str(control_plane.directory))


@pytest.fixture
def make_cluster_run(namespace: str) -> Any:
    """Return a function that makes a run of 2 nodes and 1 spare in this test's namespace."""

    def make(*, kubernetes: dict[str, Any] | None = None, local_directory: str = "", **job: Any) -> Run:
        recipe = load_recipe(P5_RECIPE)
        recipe = dataclasses.replace(
            recipe,
            job=dataclasses.replace(recipe.job, **{"spares": 1, **job}),
            kubernetes=dataclasses.replace(recipe.kubernetes, **(kubernetes or {})),
            checkpoint=dataclasses.replace(recipe.checkpoint, local=LocalConfig(directory=local_directory)),
        )
        outputs = dataclasses.replace(load_outputs(SAMPLE_OUTPUTS), namespace=namespace, spares=1)
        return make_run(recipe, Path(P5_RECIPE).read_text(), outputs)

    return make


@pytest.fixture
def started(make_cluster_run: Any, control_plane: ControlPlane, kubelets: Kubelets) -> RunInCluster:
    """Return a run whose three pods run on the three p5 nodes of its zone."""
    run = RunInCluster(make_cluster_run(), control_plane)
    run.apply()
    run.wait_for_running(3)
    return run


def _untainted(control_plane: ControlPlane) -> bool:
    nodes = control_plane.request("GET", "/api/v1/nodes")["items"]
    return not any("not-ready" in t["key"] for n in nodes for t in n["spec"].get("taints", ()))
