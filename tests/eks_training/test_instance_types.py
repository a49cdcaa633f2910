from __future__ import annotations

import gzip
import json
import subprocess
import sys
from importlib import resources
from pathlib import Path
from typing import Any

import pytest

from eks_training.instance_types import INSTANCE_TYPES, InstanceType, NetworkInterface

CONSTRUCTS = Path(__file__).parents[2] / "constructs"


@pytest.fixture(scope="module")
def described() -> dict[str, Any]:
    """EC2's DescribeInstanceTypes, as moto recorded it."""
    recorded = resources.files("moto").joinpath("ec2/resources/instance_types.json.gz").read_bytes()
    content: dict[str, Any] = json.loads(gzip.decompress(recorded))
    return content


@pytest.mark.parametrize("instance", INSTANCE_TYPES.values(), ids=INSTANCE_TYPES)
def test_row_is_what_ec2_describes(instance: InstanceType, described: dict[str, Any]) -> None:
    ec2 = described[instance.name]
    network, gpu, disk = ec2["NetworkInfo"], ec2["GpuInfo"]["Gpus"][0], ec2["InstanceStorageInfo"]["Disks"][0]

    assert instance.vcpus == ec2["VCpuInfo"]["DefaultVCpus"]
    assert instance.memory_mib == ec2["MemoryInfo"]["SizeInMiB"]
    assert (instance.gpus, instance.gpu_memory_mib) == (gpu["Count"], gpu["MemoryInfo"]["SizeInMiB"])
    assert instance.efa_interfaces == network["EfaInfo"]["MaximumEfaInterfaces"]
    assert instance.network_cards == network["MaximumNetworkCards"]
    assert instance.interfaces_per_card == network["NetworkCards"][0]["MaximumNetworkInterfaces"]
    assert instance.addresses_per_interface == network["Ipv4AddressesPerInterface"]
    assert (instance.nvme_disks, instance.nvme_disk_gb) == (disk["Count"], disk["SizeInGB"])
    assert instance.capacity_blocks == ("capacity-block" in ec2["SupportedUsageClasses"])


@pytest.mark.parametrize("instance", INSTANCE_TYPES.values(), ids=INSTANCE_TYPES)
def test_every_card_takes_the_interfaces_of_the_layout(
    instance: InstanceType, described: dict[str, Any]
) -> None:
    cards = {
        card["NetworkCardIndex"]: card for card in described[instance.name]["NetworkInfo"]["NetworkCards"]
    }

    for interface in instance.network_interfaces:
        assert interface.device < cards[interface.card]["MaximumNetworkInterfaces"]
        assert interface.kind in cards[interface.card].get("InterfaceTypes", [interface.kind])


@pytest.mark.parametrize("instance", INSTANCE_TYPES.values(), ids=INSTANCE_TYPES)
def test_layout_has_every_efa_device_and_one_primary(instance: InstanceType) -> None:
    kinds = [interface.kind for interface in instance.network_interfaces]

    assert kinds.count("efa-only") == instance.efa_interfaces
    assert instance.network_interfaces[0] == NetworkInterface(card=0, device=0, kind="interface")
    assert kinds.count("interface") == 1


@pytest.mark.parametrize(
    ("name", "interfaces", "max_pods"),
    [
        ("p5.48xlarge", 33, 51),
        ("p5en.48xlarge", 17, 149),
        ("p6-b200.48xlarge", 9, 149),
        ("p6-b300.48xlarge", 17, 149),
        ("p4d.24xlarge", 5, 688),
        ("g6e.24xlarge", 3, 443),
        ("g5.8xlarge", 2, 205),
    ],
)
def test_known_layouts(name: str, interfaces: int, max_pods: int) -> None:
    instance = INSTANCE_TYPES[name]

    assert len(instance.network_interfaces) == interfaces
    assert instance.max_pods == max_pods


def test_p6_b300_has_no_efa_on_card_0() -> None:
    on_card_0 = [i for i in INSTANCE_TYPES["p6-b300.48xlarge"].network_interfaces if i.card == 0]

    assert [interface.kind for interface in on_card_0] == ["interface"]


def test_a_pod_can_have_what_the_table_promises() -> None:
    p5 = INSTANCE_TYPES["p5.48xlarge"]

    assert p5.allocatable_cpu_millicores == 191_450
    assert 1800 * 1024 <= p5.requestable_memory_mib < p5.memory_mib


def test_table_needs_nothing_but_the_standard_library() -> None:
    script = "import sys, eks_training.instance_types; print(*sys.modules)"
    done = subprocess.run(
        [sys.executable, "-S", "-c", script],
        env={"PYTHONPATH": str(CONSTRUCTS)},
        capture_output=True,
        text=True,
        check=True,
    )

    assert not {"aws_cdk", "yaml", "jsii"} & set(done.stdout.split())
