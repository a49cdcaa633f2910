"""Security group of EFA traffic."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from eks_training.member_security_group import MemberSecurityGroup


class EfaSecurityGroup(MemberSecurityGroup):
    """All traffic between members, in and out, and nothing else.

    EFA bypasses the operating system: a rule for 0.0.0.0/0 does not cover it, each direction must name
    the group itself. IP traffic to elsewhere leaves by the cluster security group, which every
    interface also carries.
    """

    def __init__(self, scope: Construct, construct_id: str, *, vpc: ec2.IVpc) -> None:
        super().__init__(scope, construct_id, vpc=vpc, description="EFA: all traffic between training nodes")
        self.allow("EFA", protocol="-1")
