from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from eks_training.instance_types import INSTANCE_TYPES
from eks_training.node_shutdown import POD_SHUTDOWN_SECONDS
from k8s.outputs import StackOutputs
from k8s.run import make_run
from k8s.sizing import GIB, node_state_bytes
from k8s.trainer import training_job
from tests.k8s.conftest import MakeRun
from training import environment
from training.checkpoint_config import SnapshotConfig
from training.config import JobConfig
from training.errors import ConfigError

LLAMA_8B_STATE_BYTES = 8_030_261_248 * 12


def test_shared_memory_holds_the_slots_of_a_node(make: MakeRun) -> None:
    needed = SnapshotConfig().slots * LLAMA_8B_STATE_BYTES / 2
    assert needed < make().resources.shared_memory_gib * GIB < needed + 16 * GIB


def test_a_replica_is_a_whole_state(make: MakeRun) -> None:
    replicated = make(job={"replicas": 2})
    assert node_state_bytes(replicated.recipe) == LLAMA_8B_STATE_BYTES
    needed = SnapshotConfig().slots * LLAMA_8B_STATE_BYTES
    assert needed < replicated.resources.shared_memory_gib * GIB < needed + 16 * GIB


def test_pod_leaves_room_on_its_node(make: MakeRun) -> None:
    resources = make().resources
    p5 = INSTANCE_TYPES["p5.48xlarge"]
    assert resources.memory_gib <= 1800
    assert resources.cpus == 160
    assert resources.cpus * 1000 < p5.allocatable_cpu_millicores
    assert resources.memory_gib * 1024 < p5.requestable_memory_mib


@pytest.mark.parametrize(
    ("kubernetes", "capacity_gib", "deadline_seconds", "grace_seconds"),
    [
        ({}, 1200, 1800.0, 60 + 1234 + 15),  # 14 minutes of writing, and half of that again
        ({}, 9600, 1800.0, 60 + 155 + 15),
        ({}, 1200, 900.0, 60 + 900 + 15),  # a save is given up by then
        ({"model_parameters": 100_000_000}, 1200, 1800.0, POD_SHUTDOWN_SECONDS),
    ],
)
def test_grace_is_the_time_of_a_last_save(
    make: MakeRun,
    recipe: JobConfig,
    kubernetes: dict[str, Any],
    capacity_gib: int,
    deadline_seconds: float,
    grace_seconds: int,
) -> None:
    run = make(kubernetes=kubernetes)
    checkpoint = dataclasses.replace(recipe.checkpoint, deadline_seconds=deadline_seconds)
    run = make_run(
        dataclasses.replace(run.recipe, checkpoint=checkpoint),
        "",
        dataclasses.replace(run.outputs, file_system_capacity_gib=capacity_gib),
    )
    pod = training_job(run, name="name")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] == grace_seconds
    (own,) = (v["value"] for v in pod["containers"][0]["env"] if v["name"] == environment.GRACE_SECONDS)
    assert int(own) == grace_seconds - 15


def with_local(recipe: JobConfig, **local: Any) -> JobConfig:
    fields = dataclasses.replace(recipe.checkpoint.local, **local)
    return dataclasses.replace(recipe, checkpoint=dataclasses.replace(recipe.checkpoint, local=fields))


def test_copies_on_the_nodes_disk_have_room(recipe: JobConfig, outputs: StackOutputs) -> None:
    run = make_run(with_local(recipe, directory="/local", keep=2), "", outputs)
    needed = 3 * LLAMA_8B_STATE_BYTES / 2
    assert needed < run.resources.local_disk_gib * GIB < needed + 20 * GIB
    pod = training_job(run, name="name")["spec"]["template"]["spec"]
    size = f"{run.resources.local_disk_gib}Gi"
    assert {"name": "local", "emptyDir": {"sizeLimit": size}} in pod["volumes"]
    assert pod["containers"][0]["resources"]["requests"]["ephemeral-storage"] == size


def test_a_pod_without_copies_asks_for_no_disk(make: MakeRun) -> None:
    pod = training_job(make(), name="name")["spec"]["template"]["spec"]
    assert {"name": "local", "emptyDir": {}} in pod["volumes"]
    assert "ephemeral-storage" not in pod["containers"][0]["resources"]["requests"]


@pytest.mark.parametrize(
    ("local", "message"),
    [
        ({"directory": "/nvme"}, "checkpoint.local.directory='/nvme': must be within /local"),
        (
            {"directory": "/local/copies", "keep": 900},
            "checkpoint.local.keep=900: needs 40447 GiB a node, and",
        ),
    ],
)
def test_copies_that_have_no_place_are_refused(
    recipe: JobConfig, outputs: StackOutputs, local: dict[str, Any], message: str
) -> None:
    with pytest.raises(ConfigError) as refused:
        make_run(with_local(recipe, **local), "", outputs)
    assert message in str(refused.value)


def test_state_that_does_not_fit_on_the_gpus_is_refused(make: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"job\.nodes=2: .* do not fit into the 45 GiB of an L40S"):
        make(instance_type="g6e.8xlarge", job={"ranks_per_node": 1})


def test_state_that_does_not_fit_into_memory_is_refused(make: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"job\.nodes=2: a node needs \d+ GiB \(\d+ GiB of it /dev/shm"):
        make(kubernetes={"model_parameters": 80_000_000_000})
