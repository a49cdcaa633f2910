from __future__ import annotations

import json

import aws_cdk as cdk
from aws_cdk import aws_eks_v2 as eks
from constructs import Construct

from eks_training.in_cluster_software import InClusterSoftware
from tests.eks_training.template import Synthesised

APPLIED = "Custom::AWSCDK-EKS-KubernetesResource"
NAMESPACE = {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": "training"}}


def test_group_is_applied_after_what_it_needs(stack: cdk.Stack, cluster: eks.ICluster) -> None:
    # GIVEN
    before = Construct(stack, "Before")
    cdk.CfnResource(before, "Thing", type="Test::Thing")

    # WHEN
    InClusterSoftware(stack, "Software", cluster=cluster, groups={"space": [NAMESPACE]}, after=before)

    # THEN
    template = Synthesised.of(stack)
    [manifest] = json.loads(template.one(APPLIED)["Manifest"])
    assert (manifest["kind"], manifest["metadata"]["name"]) == ("Namespace", "training")
    assert template.waits_for(APPLIED) == {"Test::Thing"}


def test_each_group_is_a_resource_of_its_own(stack: cdk.Stack, cluster: eks.ICluster) -> None:
    # WHEN
    groups = {"one": [NAMESPACE], "two": [NAMESPACE]}
    InClusterSoftware(stack, "Software", cluster=cluster, groups=groups, after=Construct(stack, "Before"))

    # THEN
    assert len(Synthesised.of(stack).all(APPLIED)) == 2
