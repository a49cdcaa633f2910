"""GPU instance types with EFA: one table that every other figure is derived from.

Imports nothing but the standard library: `stacks/` builds nodes from it, `k8s/` sizes pods from it.
Source: EC2 `DescribeInstanceTypes` (tests/eks_training/test_instance_types.py compares) and, for the
layout of network interfaces, the EC2 User Guide, "Maximize network bandwidth on accelerated instances".
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

InterfaceKind = Literal["interface", "efa-only"]

# vpc-cni keeps this many addresses on a node before the first pod starts (cluster_addons.py sets both)
CNI_MINIMUM_IP_TARGET = 10
CNI_WARM_IP_TARGET = 2

# Karpenter's allowance for memory that the hypervisor and the kernel take
_MEMORY_LOSS = 0.075
# instances with the EFA driver may preallocate 5128 huge pages of 2 MiB
_HUGE_PAGES_MIB = 10_256
_KUBELET_EVICTION_MIB = 100

# type, vCPU, MiB, GPUs, GPU, MiB a GPU, EFA interfaces, network cards, interfaces a card,
# IPv4 addresses an interface, Gbps, NVMe disks, GB a disk, GPUDirect RDMA, capacity blocks
_TABLE = """
p4d.24xlarge     96 1179648 8 A100      40960  4  4 15 50  400 8 1000 rdma    blocks
p4de.24xlarge    96 1179648 8 A100      81920  4  4 15 50  400 8 1000 rdma    blocks
p5.4xlarge       16  262144 1 H100      81920  1  1  4 30  100 1 3800 rdma    blocks
p5.48xlarge     192 2097152 8 H100      81920 32 32  2 50 3200 8 3800 rdma    blocks
p5e.48xlarge    192 2097152 8 H200     144384 32 32  2 50 3200 8 3800 rdma    blocks
p5en.48xlarge   192 2097152 8 H200     144384 16 16  4 50 3200 8 3800 rdma    blocks
p6-b200.48xlarge 192 2097152 8 B200   183359  8  8  4 50 3200 8 3800 rdma    blocks
p6-b300.48xlarge 192 4194304 8 B300   275040 16 17  4 50 6400 8 3800 rdma    blocks
g4dn.8xlarge     32  131072 1 T4        16384  1  1  4 15   50 1  900 unknown -
g5.8xlarge       32  131072 1 A10G      22888  1  1  8 30   25 1  900 none    -
g5.12xlarge      48  196608 4 A10G      22888  1  1 15 50   40 1 3800 none    -
g5.48xlarge     192  786432 8 A10G      22888  1  1  7 50  100 2 3800 none    -
g6.8xlarge       32  131072 1 L4        22888  1  1  8 30   25 2  450 unknown -
g6.12xlarge      48  196608 4 L4        22888  1  1  8 30   40 4  940 unknown -
g6.24xlarge      96  393216 4 L4        22888  1  1 15 50   50 4  940 unknown -
g6.48xlarge     192  786432 8 L4        22888  1  1 15 50  100 8  940 unknown -
g6e.8xlarge      32  262144 1 L40S      45776  1  1  8 30   25 2  450 unknown -
g6e.12xlarge     48  393216 4 L40S      45776  1  1 10 30  100 2 1900 unknown -
g6e.24xlarge     96  786432 4 L40S      45776  2  2 10 50  200 2 1900 unknown -
g6e.48xlarge    192 1572864 8 L40S      45776  4  4 10 50  400 4 1900 unknown -
g7e.8xlarge      32  262144 1 RTX6000   98304  1  1  8 64  100 1 1900 unknown -
g7e.12xlarge     48  524288 2 RTX6000   98304  1  1 10 64  400 1 3800 unknown -
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkInterface:
    """One network interface of an instance."""

    card: int
    device: int
    kind: InterfaceKind


@dataclass(frozen=True, kw_only=True, slots=True)
class InstanceType:
    """What one GPU instance type has."""

    name: str
    vcpus: int
    memory_mib: int
    gpus: int
    gpu: str
    gpu_memory_mib: int
    """Memory of one GPU."""
    efa_interfaces: int
    """Most EFA devices; the value of the extended resource `vpc.amazonaws.com/efa`."""
    network_cards: int
    interfaces_per_card: int
    addresses_per_interface: int
    """IPv4 addresses, the primary one included."""
    bandwidth_gbps: int
    nvme_disks: int
    nvme_disk_gb: int
    gpudirect_rdma: bool | None
    """Whether NCCL can use GPUDirect RDMA; None where no source says."""
    capacity_blocks: bool
    """Whether EC2 sells capacity blocks of this type."""

    @property
    def network_interfaces(self) -> tuple[NetworkInterface, ...]:
        """The layout that spends one IP address a node and still gives the full EFA bandwidth.

        The primary interface carries IP and is never `efa-only`. Where card 0 has EFA at all, its
        second device is `efa-only`; on p6-b300 it has none. Every further card is `efa-only`.
        """
        primary = NetworkInterface(card=0, device=0, kind="interface")
        second = NetworkInterface(card=0, device=1, kind="efa-only")
        on_card_0 = (primary, second) if self.network_cards == self.efa_interfaces else (primary,)
        others = (
            NetworkInterface(card=card, device=0, kind="efa-only") for card in range(1, self.network_cards)
        )
        return (*on_card_0, *others)

    @property
    def max_pods(self) -> int:
        """Pods that can get an address: the EFA device takes one interface of card 0 from the CNI.

        nodeadm counts that interface too (100 pods on p5, where 49 addresses exist), so pods would be
        scheduled that never start. `node_user_data.py` gives nodeadm this formula instead.
        """
        return (self.interfaces_per_card - 1) * (self.addresses_per_interface - 1) + 2

    @property
    def addresses_per_node(self) -> int:
        """Subnet addresses that one idle node takes: its own, and those the CNI keeps for pods."""
        interfaces = sum(interface.kind == "interface" for interface in self.network_interfaces)
        return interfaces + CNI_MINIMUM_IP_TARGET + CNI_WARM_IP_TARGET

    @property
    def allocatable_cpu_millicores(self) -> int:
        """CPU left for pods after nodeadm's kube-reserved."""
        reserved = 60 + 10 + 5 + 5 + 2.5 * (self.vcpus - 4)
        return int(self.vcpus * 1000 - reserved)

    @property
    def requestable_memory_mib(self) -> int:
        """Memory that a pod can surely get, huge pages that it does not use taken off."""
        usable = self.memory_mib * (1 - _MEMORY_LOSS)
        reserved = 11 * self.max_pods + 255 + _KUBELET_EVICTION_MIB
        return int(usable - reserved - _HUGE_PAGES_MIB)


def _parse(row: str) -> InstanceType:
    name, vcpus, memory, gpus, gpu, gpu_memory, *network, disks, disk_gb, rdma, blocks = row.split()
    efa, cards, per_card, addresses, bandwidth = (int(cell) for cell in network)
    return InstanceType(
        name=name,
        vcpus=int(vcpus),
        memory_mib=int(memory),
        gpus=int(gpus),
        gpu=gpu,
        gpu_memory_mib=int(gpu_memory),
        efa_interfaces=efa,
        network_cards=cards,
        interfaces_per_card=per_card,
        addresses_per_interface=addresses,
        bandwidth_gbps=bandwidth,
        nvme_disks=int(disks),
        nvme_disk_gb=int(disk_gb),
        gpudirect_rdma={"rdma": True, "none": False, "unknown": None}[rdma],
        capacity_blocks=blocks == "blocks",
    )


INSTANCE_TYPES: Mapping[str, InstanceType] = MappingProxyType(
    {instance.name: instance for instance in map(_parse, _TABLE.strip().splitlines())}
)
"""Every supported GPU instance type by its name."""
