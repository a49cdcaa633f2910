"""IAM roles that pods take by EKS Pod Identity."""

from __future__ import annotations

from collections.abc import Sequence

from aws_cdk import aws_iam as iam
from constructs import Construct


def pod_identity_role(scope: Construct, construct_id: str, *, policies: Sequence[str] = ()) -> iam.Role:
    """Make a role that the Pod Identity agent may hand to a pod, with AWS managed `policies`."""
    return iam.Role(
        scope,
        construct_id,
        # AssumeRole and TagSession
        assumed_by=iam.SessionTagsPrincipal(iam.ServicePrincipal("pods.eks.amazonaws.com")),
        managed_policies=[iam.ManagedPolicy.from_aws_managed_policy_name(name) for name in policies],
    )
