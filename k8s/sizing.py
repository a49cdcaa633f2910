"""Resources of one trainer pod, computed from the training state and the instance type.

A trainer pod takes a whole node. What it asks for stays below what the smallest node of the type has
left after kubelet, add-ons and the allowance that `InstanceType.requestable_memory_mib` makes.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

from eks_training.instance_types import InstanceType
from eks_training.node_shutdown import POD_SHUTDOWN_SECONDS
from k8s import model_size
from training.config import JobConfig
from training.errors import ConfigError, Problem

GIB = 1 << 30

_SHARED_MEMORY_PER_RANK_GIB = 1  # NCCL, data workers
_HOST_MEMORY_PER_RANK_GIB = 8  # CUDA context, pinned buffers, prefetched batches, writer process
_HOST_MEMORY_PER_NODE_GIB = 8
_GPU_BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and two moments, all sharded

_MEMORY_SHARE = 15 / 16  # the rest is for DaemonSets and the preparation Job
_CPU_SHARE = 5 / 6  # a request, never a limit: throttling stalls NCCL's proxy threads

# Process 1 passes SIGTERM on at once, and nothing is saved on it: ranks die of it. The time is for
# one that the kernel holds, in the GPU driver or in I/O, and for the launcher to end.
GRACE_SECONDS = POD_SHUTDOWN_SECONDS
"""From SIGTERM to SIGKILL of a trainer pod: all that a node which shuts down gives it."""
GRACE_MARGIN_SECONDS = 15
"""Time that process 1 leaves the kubelet between its own SIGKILL and the pod's."""


@dataclass(frozen=True, kw_only=True, slots=True)
class PodResources:
    """What one trainer pod asks for."""

    gpus: int
    efa_interfaces: int
    cpus: int
    memory_gib: int
    shared_memory_gib: int
    hugepages_mib: int


def pod_resources(recipe: JobConfig, instance: InstanceType) -> PodResources:
    """Size a trainer pod.

    Raises:
        ConfigError: The state does not fit on the GPUs or in the memory of the nodes.
    """
    memory_gib = int(instance.requestable_memory_mib * _MEMORY_SHARE / 1024)
    shared_memory_gib = shared_memory_needed_gib(recipe)
    problems = [
        *_gpu_memory_problems(recipe, instance),
        *_host_memory_problems(recipe, instance, memory_gib, shared_memory_gib),
    ]
    if problems:
        raise ConfigError(problems)
    return PodResources(
        gpus=instance.gpus,
        efa_interfaces=instance.efa_interfaces,
        cpus=int(instance.vcpus * _CPU_SHARE),
        memory_gib=memory_gib,
        shared_memory_gib=shared_memory_gib,
        hugepages_mib=recipe.kubernetes.hugepages_mib,
    )


def node_state_bytes(recipe: JobConfig) -> int:
    """Return the bytes of training state that one node holds."""
    return math.ceil(model_size.state_bytes(recipe) * recipe.job.replicas / recipe.job.nodes)


def shared_memory_needed_gib(recipe: JobConfig) -> int:
    """Return the size of /dev/shm: snapshot slots and working room."""
    working = _SHARED_MEMORY_PER_RANK_GIB * recipe.job.ranks_per_node
    return math.ceil(recipe.snapshot.slots * node_state_bytes(recipe) / GIB) + working + 4


def _gpu_memory_problems(recipe: JobConfig, instance: InstanceType) -> Iterator[Problem]:
    shards = recipe.job.world_size // recipe.job.replicas
    needed_mib = model_size.parameter_count(recipe) * _GPU_BYTES_PER_PARAMETER / shards / (1 << 20)
    if needed_mib >= instance.gpu_memory_mib:
        rule = (
            f"{needed_mib / 1024:.0f} GiB of state and gradients a GPU do not fit into the "
            f"{instance.gpu_memory_mib / 1024:.0f} GiB of an {instance.gpu} ({instance.name})"
        )
        yield Problem(path="job.nodes", value=recipe.job.nodes, rule=rule, fix="use more nodes")


def _host_memory_problems(
    recipe: JobConfig, instance: InstanceType, memory_gib: int, shared_memory_gib: int
) -> Iterator[Problem]:
    processes = _HOST_MEMORY_PER_NODE_GIB + _HOST_MEMORY_PER_RANK_GIB * recipe.job.ranks_per_node
    needed = shared_memory_gib + processes + recipe.kubernetes.hugepages_mib / 1024
    if needed > memory_gib:
        rule = (
            f"a node needs {needed:.0f} GiB ({shared_memory_gib} GiB of it /dev/shm for snapshots) and "
            f"{instance.name} has {memory_gib} GiB for a pod"
        )
        fix = "use more nodes, or a type with more memory"
        yield Problem(path="job.nodes", value=recipe.job.nodes, rule=rule, fix=fix)
