"""Self-managed GPU nodes with EFA: launch template and Auto Scaling group.

Own resources, because CDK's self-managed nodes still run AL2's bootstrap.sh (aws/aws-cdk#37850), and
managed node groups can neither suspend replacement nor take a layout with `efa-only` interfaces.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from aws_cdk import ArnFormat, CfnTag, Fn, Stack
from aws_cdk import aws_autoscaling as autoscaling
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_iam as iam
from aws_cdk import custom_resources as cr
from constructs import Construct

from eks_training.capacity import Capacity, LaunchTemplate
from eks_training.instance_types import InstanceType, NetworkInterface
from eks_training.node_role import node_role

# Replacing a node for a failed status check would kill the state in its RAM, and moving nodes between
# zones makes no sense in one zone. A person decides; scaling by hand and by schedule still work.
SUSPENDED_PROCESSES = ("AZRebalance", "ReplaceUnhealthy")

_NOTIFICATIONS = (
    "autoscaling:EC2_INSTANCE_LAUNCH",
    "autoscaling:EC2_INSTANCE_LAUNCH_ERROR",
    "autoscaling:EC2_INSTANCE_TERMINATE",
    "autoscaling:EC2_INSTANCE_TERMINATE_ERROR",
)


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeSettings:
    """What the nodes are made of."""

    instance: InstanceType
    image_id: str
    """AMI id, or a token that resolves to one."""
    user_data: str
    """MIME document, not yet base64."""
    root_volume_gib: int
    tags: Mapping[str, str]
    """For instances, volumes and network interfaces."""


class GpuNodeGroup(Construct):
    """Up to `size` GPU nodes in one subnet, joined to `cluster`.

    The group never rolls or replaces a node by itself: a changed launch template only serves new nodes.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        cluster: eks.ICluster,
        subnet: ec2.ISubnet,
        security_groups: Sequence[ec2.ISecurityGroup],
        nodes: NodeSettings,
        size: int,
        parked: bool,
        capacity: Capacity,
        notification_topic_arn: str,
    ) -> None:
        super().__init__(scope, construct_id)
        self._capacity = capacity
        self.role = node_role(self, "Role")
        self._access_entry = eks.AccessEntry(
            self,
            "AccessEntry",
            cluster=cluster,
            principal=self.role.role_arn,
            # an EC2_LINUX entry can carry no policies
            access_policies=[],
            access_entry_type=eks.AccessEntryType.EC2_LINUX,
        )
        group_ids = [group.security_group_id for group in security_groups]
        template = self._launch_template(nodes, [*group_ids, cluster.cluster_security_group_id])
        self.group = autoscaling.CfnAutoScalingGroup(
            self,
            "Group",
            min_size="0",
            max_size=str(size),
            desired_capacity=self._desired(size, parked),
            vpc_zone_identifier=[subnet.subnet_id],
            launch_template=autoscaling.CfnAutoScalingGroup.LaunchTemplateSpecificationProperty(
                launch_template_id=template.ref, version=template.attr_latest_version_number
            ),
            health_check_type="EC2",
            metrics_collection=[
                autoscaling.CfnAutoScalingGroup.MetricsCollectionProperty(granularity="1Minute")
            ],
            notification_configurations=[
                autoscaling.CfnAutoScalingGroup.NotificationConfigurationProperty(
                    topic_arn=notification_topic_arn, notification_types=list(_NOTIFICATIONS)
                )
            ],
            tags=[
                autoscaling.CfnAutoScalingGroup.TagPropertyProperty(
                    key=f"kubernetes.io/cluster/{cluster.cluster_name}",
                    value="owned",
                    propagate_at_launch=True,
                )
            ],
        )
        self.group.node.add_dependency(self._access_entry)
        self._suspend_processes()
        if not parked:
            self._schedule(size)

    @property
    def group_name(self) -> str:
        """Name of the Auto Scaling group."""
        return self.group.ref

    def _desired(self, size: int, parked: bool) -> str | None:
        if parked:
            return "0"
        # a block that has not begun has no capacity: the scheduled action launches the nodes
        return None if self._capacity.start else str(size)

    def _launch_template(self, nodes: NodeSettings, group_ids: list[str]) -> LaunchTemplate:
        profile = iam.CfnInstanceProfile(self, "Profile", roles=[self.role.role_name])
        interfaces = [_interface(interface, group_ids) for interface in nodes.instance.network_interfaces]
        data = LaunchTemplate.LaunchTemplateDataProperty(
            image_id=nodes.image_id,
            instance_type=nodes.instance.name,
            user_data=Fn.base64(nodes.user_data),
            iam_instance_profile=LaunchTemplate.IamInstanceProfileProperty(arn=profile.attr_arn),
            # hop limit 1 keeps pods away from the node's role: they have Pod Identity
            metadata_options=LaunchTemplate.MetadataOptionsProperty(
                http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
            ),
            block_device_mappings=[_root_volume(nodes.root_volume_gib)],
            network_interfaces=interfaces,
            placement=self._placement(),
            instance_market_options=self._capacity.market_options,
            capacity_reservation_specification=self._capacity.reservation,
            monitoring=LaunchTemplate.MonitoringProperty(enabled=True),
            tag_specifications=[
                _tags(resource, nodes.tags) for resource in ("instance", "volume", "network-interface")
            ],
        )
        return LaunchTemplate(self, "LaunchTemplate", launch_template_data=data)

    def _placement(self) -> LaunchTemplate.PlacementProperty | None:
        if self._capacity.wants_own_placement_group:
            group = ec2.CfnPlacementGroup(self, "PlacementGroup", strategy="cluster")
            return LaunchTemplate.PlacementProperty(group_name=group.ref)
        if self._capacity.placement_group:
            return LaunchTemplate.PlacementProperty(group_name=self._capacity.placement_group)
        return None

    def _suspend_processes(self) -> None:
        call = cr.AwsSdkCall(
            service="AutoScaling",
            action="suspendProcesses",
            parameters={
                "AutoScalingGroupName": self.group_name,
                "ScalingProcesses": list(SUSPENDED_PROCESSES),
            },
            physical_resource_id=cr.PhysicalResourceId.of(self.group_name),
        )
        cr.AwsCustomResource(
            self,
            "SuspendProcesses",
            resource_type="Custom::SuspendProcesses",
            on_update=call,
            install_latest_aws_sdk=False,
            policy=cr.AwsCustomResourcePolicy.from_sdk_calls(resources=[self._group_arn()]),
        )

    def _group_arn(self) -> str:
        # EC2 Auto Scaling puts an unknown id before the name
        return Stack.of(self).format_arn(
            service="autoscaling",
            resource="autoScalingGroup",
            resource_name=f"*:autoScalingGroupName/{self.group_name}",
            arn_format=ArnFormat.COLON_RESOURCE_NAME,
        )

    def _schedule(self, size: int) -> None:
        if self._capacity.start:
            self._scheduled_size("Launch", size, self._capacity.start)
        if self._capacity.drain_at:
            self._scheduled_size("Drain", 0, self._capacity.drain_at)

    def _scheduled_size(self, construct_id: str, size: int, at: str) -> None:
        autoscaling.CfnScheduledAction(
            self,
            construct_id,
            auto_scaling_group_name=self.group_name,
            desired_capacity=size,
            start_time=at,
            time_zone="Etc/UTC",
        )


def _interface(interface: NetworkInterface, group_ids: list[str]) -> LaunchTemplate.NetworkInterfaceProperty:
    # no public address: EC2 refuses one with several interfaces (terraform-aws-eks#3533)
    return LaunchTemplate.NetworkInterfaceProperty(
        network_card_index=interface.card,
        device_index=interface.device,
        interface_type=interface.kind,
        groups=group_ids,
        delete_on_termination=True,
    )


def _root_volume(gib: int) -> LaunchTemplate.BlockDeviceMappingProperty:
    volume = LaunchTemplate.EbsProperty(
        volume_size=gib,
        volume_type="gp3",
        encrypted=True,
        delete_on_termination=True,
        iops=6000,
        throughput=500,
    )
    return LaunchTemplate.BlockDeviceMappingProperty(device_name="/dev/xvda", ebs=volume)


def _tags(resource: str, tags: Mapping[str, str]) -> LaunchTemplate.TagSpecificationProperty:
    pairs = [CfnTag(key=key, value=value) for key, value in tags.items()]
    return LaunchTemplate.TagSpecificationProperty(resource_type=resource, tags=pairs)
