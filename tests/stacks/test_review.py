from __future__ import annotations

import json
from typing import Any

import aws_cdk as cdk
import pytest
from aws_cdk import aws_eks_v2 as eks

from stacks.review import ControlPlaneRules, acknowledgments
from tests.stacks.conftest import Deployment


def nag(deployment: Deployment) -> dict[str, Any]:
    report = json.loads((deployment.folder / "validation-report.json").read_text())
    [plugin] = [p for p in report["pluginReports"] if p["pluginName"] == "AwsSolutions"]
    return dict(plugin)


@pytest.mark.parametrize("variant", ["default", "rendered", "everything", "existing"])
def test_no_finding_is_left(variant: str, request: pytest.FixtureRequest) -> None:
    assert nag(request.getfixturevalue(variant))["violations"] == []


@pytest.mark.parametrize("variant", ["default", "rendered", "everything", "existing"])
def test_no_acknowledgment_is_left_over(variant: str, request: pytest.FixtureRequest) -> None:
    # GIVEN
    deployment: Deployment = request.getfixturevalue(variant)
    declared = {f"AwsSolutions-{item.rule}" for item in acknowledgments(deployment.stacks, deployment.config)}

    # WHEN
    used = {finding["ruleName"] for finding in nag(deployment)["suppressedViolations"]}

    # THEN
    assert declared == used


def test_reasons_are_sentences(default: Deployment) -> None:
    for item in acknowledgments(default.stacks, default.config):
        assert len(item.reason.split()) >= 8, item.rule
        assert item.reason.endswith(".")


def control_plane(stack: cdk.Stack, **changes: Any) -> list[str]:
    every = ["api", "audit", "authenticator", "controllerManager", "scheduler"]
    logs = [eks.CfnCluster.LoggingTypeConfigProperty(type=name) for name in changes.pop("logs", every)]
    network: dict[str, Any] = {
        "subnet_ids": ["subnet-1", "subnet-2"],
        "endpoint_private_access": True,
        "endpoint_public_access": True,
        "public_access_cidrs": ["203.0.113.0/24"],
    }
    encrypted = eks.CfnCluster.EncryptionConfigProperty(
        provider=eks.CfnCluster.ProviderProperty(key_arn="arn:key"), resources=["secrets"]
    )
    encryption = [encrypted] if changes.pop("encrypted", True) else None
    eks.CfnCluster(
        stack,
        "Cluster",
        role_arn="arn:role",
        resources_vpc_config=eks.CfnCluster.ResourcesVpcConfigProperty(**(network | changes)),
        logging=eks.CfnCluster.LoggingProperty(
            cluster_logging=eks.CfnCluster.ClusterLoggingProperty(enabled_types=logs)
        ),
        encryption_config=encryption,
    )
    return ControlPlaneRules(stack).validate()


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        ({"public_access_cidrs": ["0.0.0.0/0"]}, "the public endpoint is open to the internet"),
        ({"public_access_cidrs": []}, "the public endpoint is open to the internet"),
        ({"endpoint_private_access": False}, "nodes reach the control plane over the internet"),
        ({"logs": ["api", "audit"]}, "logs are off: authenticator, controllerManager, scheduler"),
        ({"encrypted": False}, "secrets are not encrypted"),
    ],
)
def test_control_plane_that_nag_cannot_see_is_refused(changes: dict[str, Any], message: str) -> None:
    # GIVEN
    stack = cdk.Stack(cdk.App(builtin_cloud_formation_validation=False), "Test")

    # WHEN
    [found] = control_plane(stack, **changes)

    # THEN
    assert message in found


def test_good_control_plane_passes() -> None:
    stack = cdk.Stack(cdk.App(builtin_cloud_formation_validation=False), "Test")

    assert control_plane(stack) == []


def test_broken_rule_stops_the_synthesis() -> None:
    # GIVEN
    app = cdk.App(builtin_cloud_formation_validation=False)
    stack = cdk.Stack(app, "Test")
    control_plane(stack, logs=["api"])
    stack.node.add_validation(ControlPlaneRules(stack))

    # THEN
    with pytest.raises(RuntimeError, match="control-plane logs are off"):
        app.synth()
