"""The EKS control plane."""

from __future__ import annotations

import hashlib
from collections.abc import Sequence
from typing import cast

from aws_cdk import RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_kms as kms
from aws_cdk.lambda_layer_kubectl_v36 import KubectlV36Layer
from constructs import Construct

_EVERY_LOG = [
    eks.ClusterLoggingTypes.API,
    eks.ClusterLoggingTypes.AUDIT,
    eks.ClusterLoggingTypes.AUTHENTICATOR,
    eks.ClusterLoggingTypes.CONTROLLER_MANAGER,
    eks.ClusterLoggingTypes.SCHEDULER,
]


class TrainingCluster(Construct):
    """A cluster without Auto Mode, node groups and implicit administrators."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        name: str,
        version: str,
        support: str,
        vpc: ec2.IVpc,
        subnets: Sequence[ec2.ISubnet],
        service_cidr: str,
        public_cidrs: Sequence[str],
        installs_software: bool,
    ) -> None:
        """Make the cluster.

        Args:
            support: "standard", or "extended" for six times the fee.
            public_cidrs: Who may reach the public endpoint; empty for a private endpoint only.
            installs_software: Bring CDK's kubectl provider, to apply manifests in the deploy.
        """
        super().__init__(scope, construct_id)
        private = eks.EndpointAccess.PRIVATE
        both = eks.EndpointAccess.PUBLIC_AND_PRIVATE
        cluster = eks.Cluster(
            self,
            "Cluster",
            cluster_name=name,
            version=eks.KubernetesVersion.of(version),
            vpc=vpc,
            vpc_subnets=[ec2.SubnetSelection(subnets=list(subnets))],
            service_ipv4_cidr=service_cidr,
            endpoint_access=both.only_from(*public_cidrs) if public_cidrs else private,
            secrets_encryption_key=self._secrets_key(),
            cluster_logging=_EVERY_LOG,
            # both are needed: Auto Mode is what aws_eks_v2 takes by default
            default_capacity_type=eks.DefaultCapacityType.NODEGROUP,
            default_capacity=0,
            # otherwise CloudFormation's execution role is an administrator, and nobody else is
            bootstrap_cluster_creator_admin_permissions=False,
            bootstrap_self_managed_addons=False,
            kubectl_provider_options=self._kubectl(subnets) if installs_software else None,
        )
        resource = cast(eks.CfnCluster, cluster.node.default_child)
        # EKS's default is EXTENDED
        resource.add_property_override("UpgradePolicy.SupportType", support.upper())
        # Cluster lacks one member of ICluster in jsii's type stubs
        self.cluster = cast(eks.ICluster, cluster)

    def add_admin(self, principal_arn: str) -> None:
        """Give a role or a user every right in the cluster."""
        policy = eks.AccessPolicy.from_access_policy_name(
            "AmazonEKSClusterAdminPolicy", access_scope_type=eks.AccessScopeType.CLUSTER
        )
        # named by the principal: with a running number, a removed first entry would move all others
        digest = hashlib.sha256(principal_arn.rpartition(":")[2].encode()).hexdigest()[:8]
        eks.AccessEntry(
            self,
            f"Admin{digest}",
            cluster=self.cluster,
            principal=principal_arn,
            access_policies=[policy],
        )

    def _secrets_key(self) -> kms.Key:
        return kms.Key(
            self,
            "SecretsKey",
            description="Kubernetes secrets",
            enable_key_rotation=True,
            removal_policy=RemovalPolicy.DESTROY,
        )

    def _kubectl(self, subnets: Sequence[ec2.ISubnet]) -> eks.KubectlProviderOptions:
        return eks.KubectlProviderOptions(
            kubectl_layer=KubectlV36Layer(self, "Kubectl"), private_subnets=list(subnets)
        )
