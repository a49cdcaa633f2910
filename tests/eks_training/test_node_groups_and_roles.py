from __future__ import annotations

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks

from eks_training.node_role import node_role
from eks_training.pod_identity import pod_identity_role
from eks_training.system_node_group import SystemNodeGroup
from tests.eks_training.template import Synthesised


@pytest.fixture
def template(
    stack: cdk.Stack, cluster: eks.ICluster, subnet: ec2.ISubnet, efa_group: ec2.ISecurityGroup
) -> Synthesised:
    SystemNodeGroup(
        stack,
        "System",
        cluster=cluster,
        subnet=subnet,
        security_groups=[efa_group],
        instance_type="m7i.xlarge",
        nodes=2,
        tags={"holdfast:cluster": "holdfast"},
    )
    return Synthesised.of(stack)


def test_system_nodes_are_al2023_in_the_training_subnet(template: Synthesised) -> None:
    # WHEN
    group = template.one("AWS::EKS::Nodegroup")

    # THEN
    assert group["AmiType"] == "AL2023_x86_64_STANDARD"
    assert group["Subnets"] == ["subnet-1111aaaa"]
    assert group["Labels"] == {"holdfast.dev/pool": "system"}


def test_one_system_node_more_may_run_while_one_is_replaced(template: Synthesised) -> None:
    # WHEN
    scaling = template.one("AWS::EKS::Nodegroup")["ScalingConfig"]

    # THEN
    assert scaling == {"MinSize": 2, "DesiredSize": 2, "MaxSize": 3}


def test_system_nodes_keep_the_cluster_group_and_hide_metadata(template: Synthesised) -> None:
    # WHEN
    data = template.one("AWS::EC2::LaunchTemplate")["LaunchTemplateData"]

    # THEN
    assert data["SecurityGroupIds"] == ["sg-00000efa", "sg-0c105e55"]
    assert data["MetadataOptions"]["HttpPutResponseHopLimit"] == 1
    assert data["BlockDeviceMappings"][0]["Ebs"]["Encrypted"] is True


def test_node_role_cannot_change_the_network(stack: cdk.Stack) -> None:
    # GIVEN
    node_role(stack, "Role")

    # WHEN
    role = Synthesised.of(stack).one("AWS::IAM::Role")

    # THEN the CNI has a role of its own
    assert len(role["ManagedPolicyArns"]) == 3
    assert "CNI" not in str(role["ManagedPolicyArns"])


def test_pods_take_a_role_with_session_tags(stack: cdk.Stack) -> None:
    # GIVEN
    pod_identity_role(stack, "Role", policies=["AmazonEKS_CNI_Policy"])

    # WHEN
    role = Synthesised.of(stack).one("AWS::IAM::Role")

    # THEN
    [statement] = role["AssumeRolePolicyDocument"]["Statement"]
    assert statement["Action"] == ["sts:AssumeRole", "sts:TagSession"]
    assert statement["Principal"] == {"Service": "pods.eks.amazonaws.com"}
