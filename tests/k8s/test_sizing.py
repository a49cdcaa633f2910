from __future__ import annotations

import re

import pytest

from eks_training.instance_types import INSTANCE_TYPES
from eks_training.node_user_data import NodeUserData
from k8s.sizing import GIB, node_state_bytes
from k8s.trainer import training_job
from tests.k8s.conftest import MakeRun
from training import environment
from training.checkpoint_config import SnapshotConfig
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


def test_a_node_that_shuts_down_gives_a_pod_its_whole_grace(make: MakeRun) -> None:
    # GIVEN what nodes are told, and a run whose state is large
    node = NodeUserData(
        cluster_name="c", api_server_endpoint="e", certificate_authority="a", service_cidr="s"
    )
    seconds = dict(re.findall(r"(shutdownGracePeriod\w*): (\d+)s", node.render()))
    for_pods = int(seconds["shutdownGracePeriod"]) - int(seconds["shutdownGracePeriodCriticalPods"])
    large = make(kubernetes={"model_parameters": 70_000_000_000}, nodes=16, job={"nodes": 4})
    # THEN
    pod = training_job(large, name="large")["spec"]["template"]["spec"]
    assert pod["terminationGracePeriodSeconds"] <= for_pods
    (own,) = (v["value"] for v in pod["containers"][0]["env"] if v["name"] == environment.GRACE_SECONDS)
    assert 0 < int(own) < pod["terminationGracePeriodSeconds"]


def test_state_that_does_not_fit_on_the_gpus_is_refused(make: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"job\.nodes=2: .* do not fit into the 45 GiB of an L40S"):
        make(instance_type="g6e.8xlarge", job={"ranks_per_node": 1})


def test_state_that_does_not_fit_into_memory_is_refused(make: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"job\.nodes=2: a node needs \d+ GiB \(\d+ GiB of it /dev/shm"):
        make(kubernetes={"model_parameters": 80_000_000_000})
