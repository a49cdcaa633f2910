"""How `k8s render` writes a recipe's Job. Training itself reads none of it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Annotated, Literal

from training.errors import Problem
from training.schema import Count, Pattern, Range

_LABEL = r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?"
_ObjectName = Annotated[
    str,
    Pattern(
        regex=rf"({_LABEL}(\.{_LABEL})*)?",
        description="the name of a Kubernetes object: a-z, 0-9, '-' and '.', not at an end",
    ),
]
_Registry = Annotated[
    str,
    Pattern(
        regex=r"([a-zA-Z0-9.-]+(:\d+)?(/[a-z0-9._-]+)*/?)?",
        description="HOST[:PORT][/PREFIX], without a scheme",
    ),
]
_HUGE_PAGE_MIB = 2


@dataclass(frozen=True, kw_only=True, slots=True)
class KubernetesConfig:
    """How `k8s render` writes the Job; training itself reads none of it."""

    queue: Annotated[str, Pattern(regex=rf"({_LABEL})?", description="the name of a LocalQueue")] = ""
    """Kueue LocalQueue that admits the Job; empty for no queue."""
    hugepages_mib: Count = 0
    """2 MiB huge pages a pod, for libfabric. Pending for ever where the nodes preallocate none."""
    image_registry: _Registry = ""
    """Registry host (and prefix) that replaces that of the stack's images."""
    image_pull_secret: _ObjectName = ""
    """Secret of the namespace to pull with; not needed for ECR."""
    token_secret: _ObjectName = "huggingface"
    """Secret whose key `token` opens gated hub models; mounted as a file, may be missing."""
    ttl_seconds: Annotated[int, Range(minimum=600)] = 21600
    """How long a finished Job, its pods and their logs stay."""
    model_parameters: Count = 0
    """Parameters of the model, where they can't be computed from `model`; sizes /dev/shm."""
    lock_memory: Literal["pod", "node"] = "pod"
    """Who lifts the memory-lock limit for EFA: the pod (capability IPC_LOCK, beyond Pod Security
    "baseline") or the node (RLIMIT_MEMLOCK in containerd's base runtime spec)."""
    restart_in_place: bool = False
    """Restart a trainer container that ends with 1 in its pod (Kubernetes 1.35 or newer)."""

    def problems(self) -> Iterator[Problem]:
        if self.hugepages_mib % _HUGE_PAGE_MIB:
            rule = f"must be a multiple of {_HUGE_PAGE_MIB}, the size of a page"
            yield Problem(path="hugepages_mib", value=self.hugepages_mib, rule=rule, fix="round it up")
