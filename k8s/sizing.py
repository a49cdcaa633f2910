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
from k8s.save_time import SAVE_MARGIN, save_seconds
from training.config import JobConfig
from training.errors import ConfigError, Problem

GIB = 1 << 30

_SHARED_MEMORY_PER_RANK_GIB = 1  # NCCL, data workers
_HOST_MEMORY_PER_RANK_GIB = 8  # CUDA context, pinned buffers, prefetched batches, writer process
_HOST_MEMORY_PER_NODE_GIB = 8
_GPU_BYTES_PER_PARAMETER = 16  # fp32 weight, gradient and two moments, all sharded

_MEMORY_SHARE = 15 / 16  # the rest is for DaemonSets and the preparation Job
_CPU_SHARE = 5 / 6  # a request, never a limit: throttling stalls NCCL's proxy threads

_DISK_SHARE = 0.8  # of the raw NVMe: file system, images, logs
_DISK_WORKING_GIB = 16  # compile caches

GRACE_MARGIN_SECONDS = 15
"""Time that process 1 leaves the kubelet between its own SIGKILL and the pod's."""
_PARK_SECONDS = 60  # the step that is under way, and the ends of ranks and launcher


@dataclass(frozen=True, kw_only=True, slots=True)
class PodResources:
    """What one trainer pod asks for."""

    gpus: int
    efa_interfaces: int
    cpus: int
    memory_gib: int
    shared_memory_gib: int
    hugepages_mib: int
    local_disk_gib: int
    """Most that the pod may put on its node's own disk; 0 where the recipe keeps no state there."""
    grace_seconds: int
    """From SIGTERM to SIGKILL."""


def pod_resources(
    recipe: JobConfig, instance: InstanceType, *, file_system_capacity_gib: int
) -> PodResources:
    """Size a trainer pod.

    Raises:
        ConfigError: The state does not fit on the GPUs, the disks or in the memory of the nodes.
    """
    memory_gib = int(instance.requestable_memory_mib * _MEMORY_SHARE / 1024)
    shared_memory_gib = shared_memory_needed_gib(recipe)
    problems = [
        *_gpu_memory_problems(recipe, instance),
        *_host_memory_problems(recipe, instance, memory_gib, shared_memory_gib),
        *_local_disk_problems(recipe, instance),
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
        local_disk_gib=local_disk_needed_gib(recipe),
        grace_seconds=grace_seconds(recipe, file_system_capacity_gib=file_system_capacity_gib),
    )


def node_state_bytes(recipe: JobConfig) -> int:
    """Return the bytes of training state that one node holds."""
    return math.ceil(model_size.state_bytes(recipe) * recipe.job.replicas / recipe.job.nodes)


def shared_memory_needed_gib(recipe: JobConfig) -> int:
    """Return the size of /dev/shm: snapshot slots and working room."""
    working = _SHARED_MEMORY_PER_RANK_GIB * recipe.job.ranks_per_node
    return math.ceil(recipe.snapshot.slots * node_state_bytes(recipe) / GIB) + working + 4


def local_disk_needed_gib(recipe: JobConfig) -> int:
    """Return what a node's copies on its own disk take, the one that is being written included."""
    if not recipe.checkpoint.local.directory:
        return 0
    copies = recipe.checkpoint.local.keep + 1
    return math.ceil(copies * node_state_bytes(recipe) / GIB) + _DISK_WORKING_GIB


def grace_seconds(recipe: JobConfig, *, file_system_capacity_gib: int) -> int:
    """Return the time to finish a step and to save it where every node finds it.

    The save is given up after `checkpoint.deadline_seconds`, so more would be of no use. A node that shuts
    down gives `POD_SHUTDOWN_SECONDS` only, whatever the pod asks for; less than that would be a waste.
    """
    planned = SAVE_MARGIN * save_seconds(recipe, capacity_gib=file_system_capacity_gib)
    save = min(planned, recipe.checkpoint.deadline_seconds)
    return max(POD_SHUTDOWN_SECONDS, math.ceil(_PARK_SECONDS + save + GRACE_MARGIN_SECONDS))


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


def _local_disk_problems(recipe: JobConfig, instance: InstanceType) -> Iterator[Problem]:
    needed_gib = local_disk_needed_gib(recipe)
    has_gib = int(_DISK_SHARE * instance.nvme_disks * instance.nvme_disk_gb * 1e9 / GIB)
    if needed_gib > has_gib:
        keep = recipe.checkpoint.local.keep
        rule = f"needs {needed_gib} GiB a node, and the disks of {instance.name} have {has_gib} GiB"
        yield Problem(path="checkpoint.local.keep", value=keep, rule=rule, fix="lower it, or use more nodes")
