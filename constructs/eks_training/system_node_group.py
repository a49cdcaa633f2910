"""The managed node group for what is not training: controllers, control stores, data preparation."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from aws_cdk import CfnTag
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from constructs import Construct

from eks_training.node_role import node_role
from eks_training.node_user_data import POOL_LABEL, SYSTEM_POOL

_ROOT_VOLUME_GIB = 100


class SystemNodeGroup(Construct):
    """Small untainted nodes that EKS rolls and repairs."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        cluster: eks.ICluster,
        subnet: ec2.ISubnet,
        security_groups: Sequence[ec2.ISecurityGroup],
        instance_type: str,
        nodes: int,
        tags: Mapping[str, str],
    ) -> None:
        super().__init__(scope, construct_id)
        group_ids = [group.security_group_id for group in security_groups]
        template = self._launch_template([*group_ids, cluster.cluster_security_group_id], tags)
        self.nodegroup = eks.Nodegroup(
            self,
            "Group",
            cluster=cluster,
            # CDK's default still names AL2
            ami_type=eks.NodegroupAmiType.AL2023_X86_64_STANDARD,
            instance_types=[ec2.InstanceType(instance_type)],
            launch_template_spec=eks.LaunchTemplateSpec(
                id=template.ref, version=template.attr_latest_version_number
            ),
            node_role=node_role(self, "Role"),
            subnets=ec2.SubnetSelection(subnets=[subnet]),
            min_size=nodes,
            desired_size=nodes,
            max_size=nodes + 1,
            labels={POOL_LABEL: SYSTEM_POOL},
            enable_node_auto_repair=True,
        )

    def _launch_template(self, group_ids: list[str], tags: Mapping[str, str]) -> ec2.CfnLaunchTemplate:
        template = ec2.CfnLaunchTemplate
        volume = template.EbsProperty(
            volume_size=_ROOT_VOLUME_GIB, volume_type="gp3", encrypted=True, delete_on_termination=True
        )
        pairs = [CfnTag(key=key, value=value) for key, value in tags.items()]
        data = template.LaunchTemplateDataProperty(
            # EKS adds the cluster security group only where the template names none
            security_group_ids=group_ids,
            metadata_options=template.MetadataOptionsProperty(
                http_endpoint="enabled", http_tokens="required", http_put_response_hop_limit=1
            ),
            block_device_mappings=[template.BlockDeviceMappingProperty(device_name="/dev/xvda", ebs=volume)],
            tag_specifications=[
                template.TagSpecificationProperty(resource_type=resource, tags=pairs)
                for resource in ("instance", "volume", "network-interface")
            ],
        )
        return template(self, "LaunchTemplate", launch_template_data=data)
