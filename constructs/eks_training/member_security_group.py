"""Security group whose members reach each other, and nothing else."""

from __future__ import annotations

from aws_cdk import aws_ec2 as ec2
from constructs import Construct


class MemberSecurityGroup(Construct):
    """A group with no rules but those that name itself."""

    def __init__(self, scope: Construct, construct_id: str, *, vpc: ec2.IVpc, description: str) -> None:
        super().__init__(scope, construct_id)
        self.security_group = ec2.SecurityGroup(
            self,
            "Group",
            vpc=vpc,
            description=description,
            # with True, CDK drops every egress rule that is added later
            allow_all_outbound=False,
        )

    def allow(self, traffic: str, *, protocol: str, ports: tuple[int, int] | None = None) -> list[Construct]:
        """Allow traffic between members both ways and return the two rules.

        Args:
            traffic: What it is, for people.
            protocol: As EC2 names it; "-1" for all.
            ports: First and last port; None where the protocol has none.
        """
        group_id = self.security_group.security_group_id
        first, last = ports or (None, None)
        suffix = "Members" if first is None else str(first)
        ingress = ec2.CfnSecurityGroupIngress(
            self,
            f"From{suffix}",
            group_id=group_id,
            ip_protocol=protocol,
            from_port=first,
            to_port=last,
            source_security_group_id=group_id,
            description=f"{traffic} from members",
        )
        egress = ec2.CfnSecurityGroupEgress(
            self,
            f"To{suffix}",
            group_id=group_id,
            ip_protocol=protocol,
            from_port=first,
            to_port=last,
            destination_security_group_id=group_id,
            description=f"{traffic} to members",
        )
        return [ingress, egress]
