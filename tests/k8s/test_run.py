from __future__ import annotations

import dataclasses
from datetime import UTC, datetime

import pytest

from k8s.manifests import job_objects
from k8s.outputs import StackOutputs
from k8s.run import make_run
from tests.k8s.conftest import MakeRun
from training.config import JobConfig
from training.errors import ConfigError


@pytest.mark.parametrize(
    ("overrides", "message"),
    [
        ({"job": {"ranks_per_node": 4}}, "job.ranks_per_node=4: must be the 8 GPUs of p5.48xlarge"),
        ({"job": {"nodes": 4}}, "job.nodes=4: with 0 spares, must be within the cluster's 2"),
        ({"job": {"spares": 1}}, "job.nodes=2: with 1 spares, must be within the cluster's 2"),
        ({"instance_type": "p5.48xlarg"}, "did you mean 'p5.48xlarge'?"),
        (
            {"kubernetes": {"restart_in_place": True}, "kubernetes_version": "1.34"},
            "kubernetes.restart_in_place=True: needs Kubernetes 1.35; the cluster has 1.34",
        ),
    ],
)
def test_refuses_what_the_cluster_cannot_run(
    make: MakeRun, overrides: dict[str, object], message: str
) -> None:
    with pytest.raises(ConfigError) as caught:
        make(**overrides)
    assert message in str(caught.value)


def test_data_must_be_on_the_shared_file_system(recipe: JobConfig, outputs: StackOutputs) -> None:
    local = dataclasses.replace(recipe, data=dataclasses.replace(recipe.data, path="runs/data"))
    with pytest.raises(ConfigError, match=r"data\.path='runs/data': must be on the shared file system"):
        make_run(local, "", outputs)


def test_a_run_stops_before_its_capacity_is_drained(make: MakeRun) -> None:
    # GIVEN a block that is emptied an hour before its end, and a run that takes 1309 s to stop
    run = make(capacity_mode="capacity-block", capacity_end="2026-12-09T11:30:00Z")
    assert run.resources.grace_seconds == 1309
    # THEN
    assert run.stop_at == datetime(2026, 12, 9, 10, 8, 11, tzinfo=UTC)
    (control,) = (o for o in job_objects(run) if o["kind"] == "Job" and "control" in o["metadata"]["name"])
    (publisher,) = control["spec"]["template"]["spec"]["initContainers"]
    assert publisher["command"][-2:] == ["--stop-at", "2026-12-09T10:08:11+00:00"]
    assert make().stop_at is None


def test_a_cpu_recipe_is_refused(recipe: JobConfig, outputs: StackOutputs) -> None:
    cpu = dataclasses.replace(recipe, training=dataclasses.replace(recipe.training, device="cpu"))
    with pytest.raises(ConfigError, match="these are GPU nodes"):
        make_run(cpu, "", outputs)


def test_private_registry_replaces_the_host(make: MakeRun) -> None:
    run = make(kubernetes={"image_registry": "registry.example/mirror/"})
    assert run.image(run.outputs.control_image) == "registry.example/mirror/holdfast/control:0.1.0"
