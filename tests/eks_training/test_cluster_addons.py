from __future__ import annotations

import json
from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk import aws_eks_v2 as eks
from constructs import Construct

from eks_training.cluster_addons import ClusterAddons
from tests.eks_training.template import Synthesised


@pytest.fixture
def template(stack: cdk.Stack, cluster: eks.ICluster) -> Synthesised:
    addons = ClusterAddons(stack, "Addons", cluster=cluster, versions={"coredns": "v1.13.2-eksbuild.1"})
    nodes = Construct(stack, "Nodes")
    cdk.CfnResource(nodes, "Group", type="Test::Nodes")
    nodes.node.add_dependency(*addons.before_nodes)
    addons.add_workload_addons(after=nodes)
    return Synthesised.of(stack)


def addon_name(resource: dict[str, Any]) -> str:
    return str(resource.get("Properties", {}).get("AddonName", ""))


def addon(template: Synthesised, name: str) -> dict[str, Any]:
    [found] = [r for r in template.resources.values() if addon_name(r) == name]
    return dict(found)


def waits_for(template: Synthesised, name: str) -> set[str]:
    names = addon(template, name).get("DependsOn", [])
    resources = [template.resources[n] for n in names]
    return {addon_name(r) or r["Type"] for r in resources}


@pytest.mark.parametrize("name", ["coredns", "aws-fsx-csi-driver", "eks-node-monitoring-agent"])
def test_addons_with_deployments_wait_for_nodes(template: Synthesised, name: str) -> None:
    assert "Test::Nodes" in waits_for(template, name)


@pytest.mark.parametrize("name", ["vpc-cni", "kube-proxy", "eks-pod-identity-agent"])
def test_nodes_wait_for_what_makes_them_ready(template: Synthesised, name: str) -> None:
    # WHEN
    _, nodes = template.only("Test::Nodes")

    # THEN
    assert name in {addon_name(template.resources[n]) for n in nodes["DependsOn"]}


def test_cni_waits_for_the_agent_that_gives_it_its_role(template: Synthesised) -> None:
    assert waits_for(template, "vpc-cni") == {"eks-pod-identity-agent"}
    [identity] = addon(template, "vpc-cni")["Properties"]["PodIdentityAssociations"]
    assert identity["ServiceAccount"] == "aws-node"


def test_cni_does_not_take_all_addresses_of_a_node(template: Synthesised) -> None:
    # WHEN
    settings = json.loads(addon(template, "vpc-cni")["Properties"]["ConfigurationValues"])

    # THEN
    assert settings["env"] == {
        "WARM_ENI_TARGET": "0",
        "WARM_IP_TARGET": "2",
        "MINIMUM_IP_TARGET": "10",
    }


def test_gpu_checks_land_on_tainted_nodes(template: Synthesised) -> None:
    # WHEN
    settings = json.loads(addon(template, "eks-node-monitoring-agent")["Properties"]["ConfigurationValues"])

    # THEN
    [toleration] = settings["dcgmAgent"]["tolerations"]
    assert toleration == {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"}


def test_lustre_driver_has_a_role_without_permissions(template: Synthesised) -> None:
    # WHEN
    roles = template.all("AWS::IAM::Role")

    # THEN the CNI's is the only one with a policy
    assert sum("ManagedPolicyArns" in role for role in roles) == 1
    assert template.all("AWS::IAM::Policy") == []


def test_versions_can_be_pinned(template: Synthesised) -> None:
    assert addon(template, "coredns")["Properties"]["AddonVersion"] == "v1.13.2-eksbuild.1"
    assert "AddonVersion" not in addon(template, "vpc-cni")["Properties"]


def test_settings_of_an_earlier_installation_are_overwritten(template: Synthesised) -> None:
    assert {a["ResolveConflicts"] for a in template.all("AWS::EKS::Addon")} == {"OVERWRITE"}
