"""The IAM role of nodes, system and GPU alike."""

from __future__ import annotations

from aws_cdk import aws_iam as iam
from constructs import Construct

# The CNI's policy is not here: aws-node gets it by Pod Identity (cluster_addons.py).
_POLICIES = (
    "AmazonEKSWorkerNodePolicy",
    "AmazonEC2ContainerRegistryPullOnly",
    "AmazonSSMManagedInstanceCore",
)


def node_role(scope: Construct, construct_id: str) -> iam.Role:
    """Make the role: join, pull images, be reached by Session Manager."""
    return iam.Role(
        scope,
        construct_id,
        assumed_by=iam.ServicePrincipal("ec2.amazonaws.com"),
        managed_policies=[iam.ManagedPolicy.from_aws_managed_policy_name(name) for name in _POLICIES],
    )
