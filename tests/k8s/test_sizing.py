from __future__ import annotations

import pytest

from eks_training.instance_types import INSTANCE_TYPES
from k8s.sizing import GIB, OWN_SLOTS, PARTNER_SLOTS, node_state_bytes
from tests.k8s.conftest import MakeRun
from training.errors import ConfigError

LLAMA_8B_STATE_BYTES = 8_030_261_248 * 12


def test_shared_memory_holds_own_and_partner_slots(make: MakeRun) -> None:
    run = make()
    needed = (OWN_SLOTS + PARTNER_SLOTS) * LLAMA_8B_STATE_BYTES / 2
    assert needed < run.resources.shared_memory_gib * GIB < needed + 16 * GIB


def test_replicas_are_the_copies_already(make: MakeRun) -> None:
    replicated = make(job={"replicas": 2})
    assert node_state_bytes(replicated.recipe) == LLAMA_8B_STATE_BYTES
    needed = OWN_SLOTS * LLAMA_8B_STATE_BYTES
    assert needed < replicated.resources.shared_memory_gib * GIB < needed + 16 * GIB


def test_pod_leaves_room_on_its_node(make: MakeRun) -> None:
    resources = make().resources
    p5 = INSTANCE_TYPES["p5.48xlarge"]
    assert resources.memory_gib <= 1800
    assert resources.cpus == 160
    assert resources.cpus * 1000 < p5.allocatable_cpu_millicores
    assert resources.memory_gib * 1024 < p5.requestable_memory_mib


def test_grace_covers_a_save_to_local_disks(make: MakeRun) -> None:
    assert make().resources.grace_seconds == 120
    large = make(kubernetes={"model_parameters": 70_000_000_000}, nodes=16, job={"nodes": 4})
    write_seconds = 70_000_000_000 * 12 / 4 / (8 * 0.5e9)
    assert large.resources.grace_seconds >= 60 + write_seconds


def test_state_that_does_not_fit_on_the_gpus_is_refused(make: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"job\.nodes=2: .* do not fit into the 45 GiB of an L40S"):
        make(instance_type="g6e.8xlarge", job={"ranks_per_node": 1})


def test_state_that_does_not_fit_into_memory_is_refused(make: MakeRun) -> None:
    with pytest.raises(ConfigError, match=r"job\.nodes=2: a node needs \d+ GiB \(\d+ GiB of it /dev/shm"):
        make(kubernetes={"model_parameters": 70_000_000_000})
