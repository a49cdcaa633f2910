"""Security group of EFA traffic."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct


class EfaSecurityGroup(Construct):
    """All traffic between members, in and out, and nothing else.

    EFA bypasses the operating system: a rule for 0.0.0.0/0 does not cover it, each direction must name
    the group itself. IP traffic to elsewhere leaves by the cluster security group, which every
    interface also carries.
    """

    def __init__(self, scope: Construct, construct_id: str, *, vpc: ec2.IVpc) -> None:
        super().__init__(scope, construct_id)
        self.security_group = ec2.SecurityGroup(
            self,
            "Group",
            vpc=vpc,
            description="EFA: all traffic between training nodes",
            # with True, CDK drops every egress rule that is added later
            allow_all_outbound=False,
        )
        group_id = self.security_group.security_group_id
        ec2.CfnSecurityGroupIngress(
            self,
            "FromMembers",
            group_id=group_id,
            ip_protocol="-1",
            source_security_group_id=group_id,
            description="EFA from members",
        )
        ec2.CfnSecurityGroupEgress(
            self,
            "ToMembers",
            group_id=group_id,
            ip_protocol="-1",
            destination_security_group_id=group_id,
            description="EFA to members",
        )
