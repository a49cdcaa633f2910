from __future__ import annotations

from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2

from eks_training.training_cluster import TrainingCluster
from tests.eks_training.template import Synthesised

ADMIN = "arn:aws:iam::111122223333:role/PlatformAdmin"
OTHER_ADMIN = "arn:aws:iam::111122223333:role/Other"


def make(stack: cdk.Stack, vpc: ec2.IVpc, **changes: Any) -> TrainingCluster:
    settings: dict[str, Any] = {
        "name": "holdfast",
        "version": "1.36",
        "support": "standard",
        "vpc": vpc,
        "subnets": vpc.private_subnets,
        "service_cidr": "172.20.0.0/16",
        "public_cidrs": ["203.0.113.0/24"],
        "installs_software": False,
    }
    return TrainingCluster(stack, "Eks", **(settings | changes))


@pytest.fixture
def cluster_properties(stack: cdk.Stack, vpc: ec2.IVpc) -> dict[str, Any]:
    make(stack, vpc)
    return Synthesised.of(stack).one("AWS::EKS::Cluster")


def test_public_endpoint_admits_the_given_networks_only(cluster_properties: dict[str, Any]) -> None:
    # WHEN
    network = cluster_properties["ResourcesVpcConfig"]

    # THEN
    assert network["PublicAccessCidrs"] == ["203.0.113.0/24"]
    assert network["EndpointPrivateAccess"] is network["EndpointPublicAccess"] is True


def test_private_endpoint_is_not_public(stack: cdk.Stack, vpc: ec2.IVpc) -> None:
    # GIVEN
    make(stack, vpc, public_cidrs=[])

    # WHEN
    network = Synthesised.of(stack).one("AWS::EKS::Cluster")["ResourcesVpcConfig"]

    # THEN
    assert (network["EndpointPublicAccess"], network["EndpointPrivateAccess"]) == (False, True)


def test_all_control_plane_logs_are_on(cluster_properties: dict[str, Any]) -> None:
    # WHEN
    enabled = cluster_properties["Logging"]["ClusterLogging"]["EnabledTypes"]

    # THEN
    assert {e["Type"] for e in enabled} == {
        "api",
        "audit",
        "authenticator",
        "controllerManager",
        "scheduler",
    }


def test_secrets_are_encrypted_with_a_rotating_key(stack: cdk.Stack, vpc: ec2.IVpc) -> None:
    # GIVEN
    make(stack, vpc)

    # WHEN
    template = Synthesised.of(stack)

    # THEN
    [encryption] = template.one("AWS::EKS::Cluster")["EncryptionConfig"]
    assert encryption["Resources"] == ["secrets"]
    assert template.one("AWS::KMS::Key")["EnableKeyRotation"] is True


def test_nobody_becomes_administrator_by_creating_it(cluster_properties: dict[str, Any]) -> None:
    # WHEN
    access = cluster_properties["AccessConfig"]

    # THEN
    assert access == {"AuthenticationMode": "API", "BootstrapClusterCreatorAdminPermissions": False}


def test_cluster_is_plain_eks(cluster_properties: dict[str, Any]) -> None:
    assert cluster_properties["BootstrapSelfManagedAddons"] is False
    assert cluster_properties.get("ComputeConfig", {}).get("Enabled", False) is False
    assert cluster_properties["KubernetesNetworkConfig"]["ServiceIpv4Cidr"] == "172.20.0.0/16"


@pytest.mark.parametrize("support", ["standard", "extended"])
def test_support_is_what_was_asked_for(stack: cdk.Stack, vpc: ec2.IVpc, support: str) -> None:
    # GIVEN
    make(stack, vpc, support=support)

    # WHEN
    policy = Synthesised.of(stack).one("AWS::EKS::Cluster")["UpgradePolicy"]

    # THEN
    assert policy == {"SupportType": support.upper()}


def test_admins_are_named(stack: cdk.Stack, vpc: ec2.IVpc) -> None:
    # GIVEN
    make(stack, vpc).add_admin(ADMIN)

    # WHEN
    entry = Synthesised.of(stack).one("AWS::EKS::AccessEntry")

    # THEN
    assert entry["PrincipalArn"] == ADMIN
    [policy] = entry["AccessPolicies"]
    assert "AmazonEKSClusterAdminPolicy" in str(policy["PolicyArn"])
    assert policy["AccessScope"] == {"Type": "cluster"}


@pytest.mark.parametrize("admins", [[ADMIN, OTHER_ADMIN], [OTHER_ADMIN]])
def test_an_admin_keeps_its_resource_when_others_go(
    stack: cdk.Stack, vpc: ec2.IVpc, admins: list[str]
) -> None:
    # GIVEN EKS refuses a second entry for a principal, so none may move to another logical id
    cluster = make(stack, vpc)
    for admin in admins:
        cluster.add_admin(admin)

    # WHEN
    entries = Synthesised.of(stack).resources.items()

    # THEN
    [name] = [n for n, r in entries if r.get("Properties", {}).get("PrincipalArn") == OTHER_ADMIN]
    assert name.startswith("EksAdminb793771d")


def test_kubectl_provider_comes_only_with_software(stack: cdk.Stack, vpc: ec2.IVpc) -> None:
    # GIVEN
    make(stack, vpc, installs_software=False)

    # THEN
    assert Synthesised.of(stack).all("AWS::Lambda::Function") == []
