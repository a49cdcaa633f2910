"""Service quotas that a deploy meets, by code, and what a cluster needs of each."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

from stacks.config import ClusterConfig

_ON_DEMAND_BY_FAMILY = {
    "p": ("L-417A185B", "Running On-Demand P instances, vCPU"),
    "g": ("L-DB2E81BA", "Running On-Demand G and VT instances, vCPU"),
}
_BLOCKS = {
    "p4d.24xlarge": "L-2C8F52B3",
    "p5.48xlarge": "L-DA6814F2",
    "p5e.48xlarge": "L-C45F30BC",
    "p5en.48xlarge": "L-4F9BB70B",
}
_STANDARD = ("L-1216C47A", "Running On-Demand Standard instances, vCPU")


@dataclass(frozen=True, kw_only=True, slots=True)
class Need:
    """An amount that a quota must allow."""

    service: str
    code: str
    name: str
    amount: float


@dataclass(frozen=True, kw_only=True, slots=True)
class InUse:
    """What the account has already of things that few are allowed of."""

    vpcs: int
    addresses: int


def needs(config: ClusterConfig, *, system_vcpus: int, in_use: InUse) -> Iterator[Need]:
    """Yield what each quota must allow for a cluster.

    Args:
        config: The cluster.
        system_vcpus: vCPUs of one system node.
        in_use: What counts against the quotas already; running instances are not looked at.
    """
    yield from _gpu_needs(config)
    yield _need("ec2", *_STANDARD, config.system.nodes * system_vcpus)
    if config.network.existing is None:
        yield _need("vpc", "L-F678F1CE", "VPCs per Region", in_use.vpcs + 1)
        yield _need("ec2", "L-0263D0A3", "Elastic IP addresses", in_use.addresses + 1)
    yield _need("fsx", "L-AD2FC696", "Lustre Scratch capacity, GiB", config.storage.capacity_gib)
    yield _need("fsx", "L-C48231E5", "Lustre Scratch file systems", 1)


def _gpu_needs(config: ClusterConfig) -> Iterator[Need]:
    gpu = config.gpu
    if gpu.capacity.mode == "capacity-block":
        code = _BLOCKS.get(gpu.instance_type)
        if code is not None:  # P6 blocks have quotas, but their codes aren't published
            yield _need("ec2", code, f"Concurrent {gpu.instance_type} capacity blocks", gpu.group_size)
        return
    code, name = _ON_DEMAND_BY_FAMILY[gpu.instance_type[0]]
    yield _need("ec2", code, name, gpu.group_size * gpu.instance.vcpus)


def _need(service: str, code: str, name: str, amount: float) -> Need:
    return Need(service=service, code=code, name=name, amount=amount)
