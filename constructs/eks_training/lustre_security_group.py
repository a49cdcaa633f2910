"""Security group of Lustre traffic."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from eks_training.member_security_group import MemberSecurityGroup

LUSTRE_PORTS = ((988, 988), (1018, 1023))
"""Port ranges of Lustre's network layer, used in both directions."""


class LustreSecurityGroup(MemberSecurityGroup):
    """Lustre's ports between members, in and out. The file system and its clients are all members.

    It stands before the file system does: rules that come later were seen not to help
    (bottlerocket-os/bottlerocket#3459).
    """

    def __init__(self, scope: Construct, construct_id: str, *, vpc: ec2.IVpc) -> None:
        super().__init__(scope, construct_id, vpc=vpc, description="Lustre: file system and clients")
        self.rules = [
            rule for ports in LUSTRE_PORTS for rule in self.allow("Lustre", protocol="tcp", ports=ports)
        ]
