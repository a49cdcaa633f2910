"""What `cdk synth` refuses: cdk-nag's AwsSolutions rules, and ours where it is blind.

Every acknowledgment stands here with its reason. One that no finding needs fails a test.
"""

from __future__ import annotations

import json
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import aws_cdk as cdk
import jsii
from aws_cdk import aws_eks_v2 as eks
from cdk_nag import AwsSolutionsChecks
from constructs import IConstruct, IValidation

from stacks.app import Stacks
from stacks.config import ClusterConfig

_LOG_TYPES = frozenset({"api", "audit", "authenticator", "controllerManager", "scheduler"})

_SINGLETON = "AWS679f53fac002430cb0da5b7982bd2287"
"""CDK's one Lambda function for all `AwsCustomResource`s of a stack."""

_NODE_POLICIES = {
    "AmazonEKSWorkerNodePolicy": "EKS requires it of every node, and keeps it current.",
    "AmazonEC2ContainerRegistryPullOnly": "The smallest policy with which a kubelet pulls images.",
    "AmazonSSMManagedInstanceCore": "Shell by Session Manager, so that no node needs SSH keys or open ports.",
}
_LAMBDA_BASIC = "service-role/AWSLambdaBasicExecutionRole"
_LAMBDA_VPC = "service-role/AWSLambdaVPCAccessExecutionRole"
_LAMBDA_REASON = "CDK's own handler; the policy lets a function write its log or join its VPC, no more."


@dataclass(frozen=True, kw_only=True, slots=True)
class Acknowledgment:
    """A finding that stands, and why."""

    scope: IConstruct
    rule: str
    """Rule with its finding, as the report names it."""
    reason: str


def review(app: cdk.App, stacks: Stacks, config: ClusterConfig) -> None:
    """Check every stack when `app` is synthesised."""
    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app, write_suppressions_to_cloud_formation=True))
    for item in acknowledgments(stacks, config):
        acknowledgment = cdk.Acknowledgment(id=f"AwsSolutions::AwsSolutions-{item.rule}", reason=item.reason)
        cdk.Validations.of(item.scope).acknowledge(acknowledgment)
    stacks.cluster.node.add_validation(ControlPlaneRules(stacks.cluster))


def acknowledgments(stacks: Stacks, config: ClusterConfig) -> Iterator[Acknowledgment]:
    """Yield every acknowledged finding of these stacks."""
    if config.build_images:
        yield from _image_build(stacks.storage)
    yield from _cluster(stacks.cluster)
    if config.in_cluster_software == "apply":
        yield from _kubectl_provider(stacks.cluster)


def _image_build(stack: cdk.Stack) -> Iterator[Acknowledgment]:
    yield _managed(stack, _LAMBDA_BASIC, _LAMBDA_REASON, _SINGLETON)
    reason = "ecr:GetAuthorizationToken has no resource; every other action names its own."
    yield _acknowledge(stack, "IAM5[Resource::*]", reason, "ImageBuild", "Role")


def _cluster(stack: cdk.Stack) -> Iterator[Acknowledgment]:
    for policy, reason in _NODE_POLICIES.items():
        for group in ("SystemNodes", "GpuNodes"):
            yield _managed(stack, policy, reason, group, "Role")
    yield _managed(stack, _LAMBDA_BASIC, _LAMBDA_REASON, _SINGLETON)
    reason = "EKS requires it of a cluster's role, and keeps it current."
    yield _managed(stack, "AmazonEKSClusterPolicy", reason, "Eks", "Cluster", "Role")
    reason = "EKS keeps the CNI's permissions current; only aws-node gets them, by Pod Identity."
    yield _managed(stack, "AmazonEKS_CNI_Policy", reason, "Addons", "CniRole")
    gpu_nodes = cast(cdk.CfnElement, _find(stack, "GpuNodes", "Group"))
    pattern = f"autoScalingGroup:*:autoScalingGroupName/<{stack.get_logical_id(gpu_nodes)}>"
    reason = "EC2 Auto Scaling puts an id that nobody knows beforehand before the name of the one group."
    arn = f"arn:{stack.partition}:autoscaling:{stack.region}:{_account(stack)}:{pattern}"
    yield _acknowledge(stack, f"IAM5[Resource::{arn}]", reason, "GpuNodes", "SuspendProcesses")


def _kubectl_provider(stack: cdk.Stack) -> Iterator[Acknowledgment]:
    path = ("Eks", "Cluster", "KubectlProvider")
    for policy in (_LAMBDA_BASIC, _LAMBDA_VPC):
        yield _managed(stack, policy, _LAMBDA_REASON, *path)
    reason = "CDK's kubectl handler may pull charts from ECR; it offers no narrower role."
    yield _managed(stack, "AmazonEC2ContainerRegistryReadOnly", reason, *path)
    handler = cast(cdk.CfnElement, _find(stack, *path, "Handler").node.default_child)
    has_public = cast(cdk.CfnElement, _find(stack, *path, "Handler", "HasEcrPublic"))
    name = "AmazonElasticContainerRegistryPublicReadOnly"
    arn = {"Fn::Join": ["", ["arn:", {"Ref": "AWS::Partition"}, f":iam::aws:policy/{name}"]]}
    where_it_exists = {"Fn::If": [stack.get_logical_id(has_public), arn, {"Ref": "AWS::NoValue"}]}
    public = json.dumps(where_it_exists, separators=(",", ":"))
    yield _acknowledge(stack, f"IAM4[Policy::{public}]", reason, *path)
    reason = "The provider framework invokes this one handler in any of its versions."
    yield _acknowledge(stack, f"IAM5[Resource::<{stack.get_logical_id(handler)}.Arn>:*]", reason, *path)
    reason = "CDK chooses the runtime that its kubectl and AWS CLI layers are made for."
    yield _acknowledge(stack, "L1", reason, *path)


def _managed(stack: cdk.Stack, policy: str, reason: str, *path: str) -> Acknowledgment:
    return _acknowledge(stack, f"IAM4[Policy::arn:<AWS::Partition>:iam::aws:policy/{policy}]", reason, *path)


def _acknowledge(stack: cdk.Stack, rule: str, reason: str, *path: str) -> Acknowledgment:
    return Acknowledgment(scope=_find(stack, *path), rule=rule, reason=reason)


def _find(scope: IConstruct, *path: str) -> IConstruct:
    found = scope
    for name in path:
        found = found.node.find_child(name)
    return found


def _account(stack: cdk.Stack) -> str:
    return "<AWS::AccountId>" if cdk.Token.is_unresolved(stack.account) else stack.account


@jsii.implements(IValidation)
class ControlPlaneRules:
    """Rules for `aws_eks_v2`: cdk-nag's EKS1 and EKS2 look for the resource class of `aws_eks`."""

    def __init__(self, stack: cdk.Stack) -> None:
        self._stack = stack

    def validate(self) -> list[str]:
        """Return one message for each rule that a cluster breaks."""
        clusters = [node for node in self._stack.node.find_all() if isinstance(node, eks.CfnCluster)]
        return [message for cluster in clusters for message in self._broken(cluster)]

    def _broken(self, cluster: eks.CfnCluster) -> Iterator[str]:
        network = cast(Mapping[str, Any], self._stack.resolve(cluster.resources_vpc_config))
        public = network.get("endpointPublicAccess", True)
        cidrs = network.get("publicAccessCidrs") or ["0.0.0.0/0"]
        if public and "0.0.0.0/0" in cidrs:
            yield "the public endpoint is open to the internet; set access.public_cidrs"
        if not network.get("endpointPrivateAccess", False):
            yield "nodes reach the control plane over the internet; make the endpoint private too"
        logging = self._stack.resolve(cluster.logging) or {}
        enabled = logging.get("clusterLogging", {}).get("enabledTypes", [])
        missing = _LOG_TYPES - {entry["type"] for entry in enabled}
        if missing:
            yield f"control-plane logs are off: {', '.join(sorted(missing))}"
        if not self._stack.resolve(cluster.encryption_config):
            yield "secrets are not encrypted with a key of this account"
