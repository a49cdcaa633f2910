from __future__ import annotations

from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks

from eks_training.capacity import Capacity
from eks_training.gpu_node_group import SUSPENDED_PROCESSES, GpuNodeGroup, NodeSettings
from eks_training.instance_types import INSTANCE_TYPES
from tests.eks_training.template import Synthesised

GROUP = "AWS::AutoScaling::AutoScalingGroup"
RESERVATION_ID = "cr-0123456789abcdef0"


class Bench:
    """Makes node groups that differ in what a test is about."""

    def __init__(
        self, stack: cdk.Stack, cluster: eks.ICluster, subnet: ec2.ISubnet, group: ec2.ISecurityGroup
    ) -> None:
        self.stack, self.cluster, self.subnet, self.security_group = stack, cluster, subnet, group

    def group(
        self,
        *,
        instance_type: str = "p5.48xlarge",
        size: int = 3,
        parked: bool = False,
        capacity: Capacity | None = None,
    ) -> Synthesised:
        GpuNodeGroup(
            self.stack,
            "Gpu",
            cluster=self.cluster,
            subnet=self.subnet,
            security_groups=[self.security_group],
            nodes=NodeSettings(
                instance=INSTANCE_TYPES[instance_type],
                image_id="ami-0123456789abcdef0",
                user_data="MIME",
                root_volume_gib=500,
                tags={"holdfast:cluster": "holdfast"},
            ),
            size=size,
            parked=parked,
            capacity=capacity or Capacity(),
            notification_topic_arn="arn:aws:sns:us-west-2:111122223333:alarms",
        )
        return Synthesised.of(self.stack)


@pytest.fixture
def bench(
    stack: cdk.Stack, cluster: eks.ICluster, subnet: ec2.ISubnet, efa_group: ec2.ISecurityGroup
) -> Bench:
    return Bench(stack, cluster, subnet, efa_group)


def launch_data(template: Synthesised) -> dict[str, Any]:
    data: dict[str, Any] = template.one("AWS::EC2::LaunchTemplate")["LaunchTemplateData"]
    return data


@pytest.mark.parametrize(
    ("instance_type", "interfaces", "efa"),
    [
        ("p5.48xlarge", 33, 32),
        ("p5en.48xlarge", 17, 16),
        ("p6-b300.48xlarge", 17, 16),
        ("p4d.24xlarge", 5, 4),
        ("g6e.24xlarge", 3, 2),
        ("g6.8xlarge", 2, 1),
    ],
)
def test_launch_template_has_the_interfaces_of_the_type(
    bench: Bench, instance_type: str, interfaces: int, efa: int
) -> None:
    # WHEN
    data = launch_data(bench.group(instance_type=instance_type))

    # THEN
    kinds = [interface["InterfaceType"] for interface in data["NetworkInterfaces"]]
    assert data["InstanceType"] == instance_type
    assert (len(kinds), kinds.count("efa-only")) == (interfaces, efa)


def test_every_interface_has_both_groups_and_no_public_address(bench: Bench) -> None:
    # WHEN
    interfaces = launch_data(bench.group())["NetworkInterfaces"]

    # THEN
    for interface in interfaces:
        assert interface["Groups"] == ["sg-00000efa", "sg-0c105e55"]
        assert interface["DeleteOnTermination"] is True
        assert "AssociatePublicIpAddress" not in interface
        assert "SubnetId" not in interface


def test_groups_stand_only_on_the_interfaces(bench: Bench) -> None:
    # EC2 refuses top-level groups beside network interfaces
    assert "SecurityGroupIds" not in launch_data(bench.group())


def test_metadata_is_out_of_reach_for_pods(bench: Bench) -> None:
    # WHEN
    options = launch_data(bench.group())["MetadataOptions"]

    # THEN
    assert options == {"HttpEndpoint": "enabled", "HttpTokens": "required", "HttpPutResponseHopLimit": 1}


def test_root_volume_is_encrypted_gp3(bench: Bench) -> None:
    # WHEN
    [mapping] = launch_data(bench.group())["BlockDeviceMappings"]

    # THEN
    assert mapping["DeviceName"] == "/dev/xvda"
    assert (mapping["Ebs"]["Encrypted"], mapping["Ebs"]["VolumeType"]) == (True, "gp3")
    assert mapping["Ebs"]["VolumeSize"] == 500


def test_user_data_is_encoded(bench: Bench) -> None:
    assert launch_data(bench.group())["UserData"] == {"Fn::Base64": "MIME"}


def test_instances_volumes_and_interfaces_are_tagged(bench: Bench) -> None:
    # WHEN
    specifications = launch_data(bench.group())["TagSpecifications"]

    # THEN
    assert {s["ResourceType"] for s in specifications} == {"instance", "volume", "network-interface"}
    assert all({"Key": "holdfast:cluster", "Value": "holdfast"} in s["Tags"] for s in specifications)


def test_group_never_rolls_and_runs_in_one_subnet(bench: Bench) -> None:
    # WHEN
    _, resource = bench.group(size=3).only(GROUP)

    # THEN
    group = resource["Properties"]
    assert (group["MinSize"], group["DesiredCapacity"], group["MaxSize"]) == ("0", "3", "3")
    assert group["VPCZoneIdentifier"] == ["subnet-1111aaaa"]
    assert "UpdatePolicy" not in resource
    assert "MaxInstanceLifetime" not in group


def test_group_can_still_scale_to_zero(bench: Bench) -> None:
    # protection from scale-in would hold nodes back when a block ends or the group is parked
    assert "NewInstancesProtectedFromScaleIn" not in bench.group().one(GROUP)


def test_nodes_join_only_once_their_role_may(bench: Bench) -> None:
    assert "AWS::EKS::AccessEntry" in bench.group().waits_for(GROUP)


def test_access_entry_is_for_nodes_and_carries_no_policy(bench: Bench) -> None:
    # WHEN
    entry = bench.group().one("AWS::EKS::AccessEntry")

    # THEN
    assert entry["Type"] == "EC2_LINUX"
    assert entry.get("AccessPolicies", []) == []


def test_replacement_is_suspended_on_this_group_alone(bench: Bench) -> None:
    # WHEN
    template = bench.group()

    # THEN
    call = str(template.one("Custom::SuspendProcesses")["Create"])
    assert all(process in call for process in SUSPENDED_PROCESSES)
    [policy] = template.all("AWS::IAM::Policy")
    [statement] = policy["PolicyDocument"]["Statement"]
    assert statement["Action"] == "autoscaling:SuspendProcesses"
    assert "autoScalingGroupName/" in str(statement["Resource"])


def test_parked_group_has_no_nodes(bench: Bench) -> None:
    assert bench.group(parked=True).one(GROUP)["DesiredCapacity"] == "0"


def test_on_demand_nodes_share_a_placement_group(bench: Bench) -> None:
    # WHEN
    template = bench.group()

    # THEN
    name, resource = template.only("AWS::EC2::PlacementGroup")
    assert resource["Properties"]["Strategy"] == "cluster"
    assert launch_data(template)["Placement"] == {"GroupName": {"Ref": name}}
    assert "CapacityReservationSpecification" not in launch_data(template)


def test_reserved_nodes_have_no_placement_group_of_their_own(bench: Bench) -> None:
    # WHEN
    template = bench.group(capacity=Capacity(mode="reservation", reservation_id=RESERVATION_ID))

    # THEN
    data = launch_data(template)
    assert template.all("AWS::EC2::PlacementGroup") == []
    assert "Placement" not in data
    assert "InstanceMarketOptions" not in data
    assert data["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationId": RESERVATION_ID}
    }


def test_reservation_may_name_its_placement_group(bench: Bench) -> None:
    # GIVEN
    capacity = Capacity(mode="reservation", reservation_id=RESERVATION_ID, placement_group="theirs")

    # WHEN
    data = launch_data(bench.group(capacity=capacity))

    # THEN
    assert data["Placement"] == {"GroupName": "theirs"}


@pytest.fixture
def coming_block() -> Capacity:
    return Capacity(
        mode="capacity-block",
        reservation_id=RESERVATION_ID,
        start="2026-12-07T11:30:00Z",
        drain_at="2026-12-14T10:30:00Z",
    )


def test_block_is_bought_as_a_block(bench: Bench, coming_block: Capacity) -> None:
    # WHEN
    template = bench.group(capacity=coming_block)

    # THEN
    data = launch_data(template)
    assert data["InstanceMarketOptions"] == {"MarketType": "capacity-block"}
    assert data["CapacityReservationSpecification"] == {
        "CapacityReservationTarget": {"CapacityReservationId": RESERVATION_ID}
    }
    assert template.all("AWS::EC2::PlacementGroup") == []


def test_coming_block_launches_and_drains_by_schedule(bench: Bench, coming_block: Capacity) -> None:
    # WHEN
    template = bench.group(size=4, capacity=coming_block)

    # THEN
    assert "DesiredCapacity" not in template.one(GROUP)
    actions = template.all("AWS::AutoScaling::ScheduledAction")
    assert {(a["StartTime"], a["DesiredCapacity"]) for a in actions} == {
        ("2026-12-07T11:30:00Z", 4),
        ("2026-12-14T10:30:00Z", 0),
    }


def test_begun_block_launches_at_once(bench: Bench) -> None:
    # GIVEN
    capacity = Capacity(mode="capacity-block", reservation_id=RESERVATION_ID, drain_at="2026-12-14T10:30:00Z")

    # WHEN
    template = bench.group(size=4, capacity=capacity)

    # THEN
    assert template.one(GROUP)["DesiredCapacity"] == "4"
    assert template.one("AWS::AutoScaling::ScheduledAction")["DesiredCapacity"] == 0
