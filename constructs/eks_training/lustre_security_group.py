"""Security group of Lustre traffic."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct

LUSTRE_PORTS = ((988, 988), (1018, 1023))
"""Port ranges of Lustre's network layer, used in both directions."""


class LustreSecurityGroup(Construct):
    """Lustre's ports between members, in and out. The file system and its clients are all members.

    It stands before the file system does: rules that come later were seen not to help
    (bottlerocket-os/bottlerocket#3459).
    """

    def __init__(self, scope: Construct, construct_id: str, *, vpc: ec2.IVpc) -> None:
        super().__init__(scope, construct_id)
        self.security_group = ec2.SecurityGroup(
            self,
            "Group",
            vpc=vpc,
            description="Lustre: file system and clients",
            allow_all_outbound=False,
        )
        self.rules = [rule for ports in LUSTRE_PORTS for rule in self._both_ways(*ports)]

    def _both_ways(self, first: int, last: int) -> list[Construct]:
        group_id = self.security_group.security_group_id
        ingress = ec2.CfnSecurityGroupIngress(
            self,
            f"From{first}",
            group_id=group_id,
            ip_protocol="tcp",
            from_port=first,
            to_port=last,
            source_security_group_id=group_id,
            description="Lustre from members",
        )
        egress = ec2.CfnSecurityGroupEgress(
            self,
            f"To{first}",
            group_id=group_id,
            ip_protocol="tcp",
            from_port=first,
            to_port=last,
            destination_security_group_id=group_id,
            description="Lustre to members",
        )
        return [ingress, egress]
