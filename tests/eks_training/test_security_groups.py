from __future__ import annotations

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2

from eks_training.efa_security_group import EfaSecurityGroup
from eks_training.lustre_security_group import LustreSecurityGroup
from tests.eks_training.template import Synthesised

INGRESS, EGRESS = "AWS::EC2::SecurityGroupIngress", "AWS::EC2::SecurityGroupEgress"


def test_efa_traffic_is_allowed_between_members_both_ways(stack: cdk.Stack, vpc: ec2.IVpc) -> None:
    # GIVEN
    EfaSecurityGroup(stack, "Efa", vpc=vpc)

    # WHEN
    template = Synthesised.of(stack)

    # THEN
    ingress, egress = template.one(INGRESS), template.one(EGRESS)
    assert ingress["IpProtocol"] == egress["IpProtocol"] == "-1"
    assert ingress["GroupId"] == ingress["SourceSecurityGroupId"]
    assert egress["GroupId"] == egress["DestinationSecurityGroupId"] == ingress["GroupId"]


def test_efa_group_lets_nothing_else_in_or_out(stack: cdk.Stack, vpc: ec2.IVpc) -> None:
    # GIVEN
    EfaSecurityGroup(stack, "Efa", vpc=vpc)

    # WHEN
    group = Synthesised.of(stack).one("AWS::EC2::SecurityGroup")

    # THEN CDK writes an impossible rule where no traffic may leave
    assert "SecurityGroupIngress" not in group
    assert [rule["CidrIp"] for rule in group["SecurityGroupEgress"]] == ["255.255.255.255/32"]


@pytest.mark.parametrize(("kind", "peer"), [(INGRESS, "Source"), (EGRESS, "Destination")])
def test_lustre_ports_are_open_between_members(stack: cdk.Stack, vpc: ec2.IVpc, kind: str, peer: str) -> None:
    # GIVEN
    LustreSecurityGroup(stack, "Lustre", vpc=vpc)

    # WHEN
    rules = Synthesised.of(stack).all(kind)

    # THEN
    assert {(rule["FromPort"], rule["ToPort"]) for rule in rules} == {(988, 988), (1018, 1023)}
    assert all(rule["IpProtocol"] == "tcp" for rule in rules)
    assert all(rule["GroupId"] == rule[f"{peer}SecurityGroupId"] for rule in rules)
