"""The operator's way from an empty account to a cluster and back: real CDK CLI, moto as AWS.

Proves that references resolve, that resources can be made in the order of their dependencies and deleted
in its reverse, and that properties fit the services' own models. Proves nothing about capacity, quotas,
permissions, the health of add-ons, or the time that anything takes.

Tests stand in the order of the steps (conftest.py).
"""

from __future__ import annotations

import base64
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import yaml

from tests.deploy.account import ACCOUNT, REGION, Account
from tests.deploy.cdk_cli import CdkCli, Finished
from tests.deploy.in_cluster import InCluster
from tests.deploy.inventory import inventory, keys
from tests.deploy.stacks import Change, resource_id, statuses

_ROOT = Path(__file__).resolve().parents[2]

# a deploy on a busy machine
pytestmark = pytest.mark.timeout(280)


def test_bootstrap_makes_the_toolkit_stack(account: Account, bootstrapped: Finished) -> None:
    assert bootstrapped.code == 0, bootstrapped.text
    assert statuses(account) == {"CDKToolkit": "CREATE_COMPLETE"}


def test_failed_deploy_names_the_resource_and_rolls_its_stack_back(
    account: Account, failed_deploy: Finished
) -> None:
    assert failed_deploy.code != 0
    assert "AWS::AutoScaling::AutoScalingGroup: fails on demand" in failed_deploy.text
    assert statuses(account) == {
        "CDKToolkit": "CREATE_COMPLETE",
        "holdfast-network": "CREATE_COMPLETE",
        "holdfast-storage": "CREATE_COMPLETE",
        "holdfast-cluster": "ROLLBACK_COMPLETE",
    }


def test_rollback_leaves_nothing_of_the_cluster(
    account: Account, failed_deploy: Finished, objects: InCluster
) -> None:
    assert account.client("eks").list_clusters()["clusters"] == []
    assert account.client("ec2").describe_launch_templates()["LaunchTemplates"] == []
    assert account.client("cloudwatch").describe_alarms()["MetricAlarms"] == []
    assert objects.find("Namespace", "training") is None


def test_next_deploy_succeeds(account: Account, deployed: Finished) -> None:
    assert deployed.code == 0, deployed.text
    assert set(statuses(account).values()) == {"CREATE_COMPLETE"}


def test_cluster_is_what_the_settings_say(account: Account, deployed: Finished) -> None:
    cluster = account.client("eks").describe_cluster(name="holdfast")["cluster"]
    assert cluster["version"] == "1.36"
    assert cluster["resourcesVpcConfig"]["publicAccessCidrs"] == ["203.0.113.0/24"]
    assert cluster["resourcesVpcConfig"]["endpointPrivateAccess"] is True
    (logging,) = cluster["logging"]["clusterLogging"]
    assert logging["enabled"]
    assert len(logging["types"]) == 5
    assert cluster["encryptionConfig"][0]["provider"]["keyArn"].rpartition("/")[2] in keys(
        account, state="Enabled"
    )


def test_system_nodes_and_add_ons_stand(account: Account, deployed: Finished) -> None:
    eks = account.client("eks")
    (name,) = eks.list_nodegroups(clusterName="holdfast")["nodegroups"]
    group = eks.describe_nodegroup(clusterName="holdfast", nodegroupName=name)["nodegroup"]
    assert group["labels"] == {"holdfast.dev/pool": "system"}
    assert set(eks.list_addons(clusterName="holdfast")["addons"]) == {
        "aws-fsx-csi-driver",
        "coredns",
        "eks-node-monitoring-agent",
        "eks-pod-identity-agent",
        "kube-proxy",
        "vpc-cni",
    }
    addon = eks.describe_addon(clusterName="holdfast", addonName="vpc-cni")["addon"]
    (association,) = addon["podIdentityAssociations"]
    assert association.startswith(f"aws-node=arn:aws:iam::{ACCOUNT}:role/")


def test_access_entries_admit_admins_and_nodes(account: Account, deployed: Finished) -> None:
    eks = account.client("eks")
    admin = f"arn:aws:iam::{ACCOUNT}:role/PlatformAdmin"
    principals = eks.list_access_entries(clusterName="holdfast")["accessEntries"]
    entries = [
        eks.describe_access_entry(clusterName="holdfast", principalArn=principal)["accessEntry"]
        for principal in principals
    ]
    assert [entry["type"] for entry in entries].count("EC2_LINUX") == 1
    assert admin in principals
    policies = eks.list_associated_access_policies(clusterName="holdfast", principalArn=admin)
    assert [policy["policyArn"].rpartition("/")[2] for policy in policies["associatedAccessPolicies"]] == [
        "AmazonEKSClusterAdminPolicy"
    ]


def test_launch_template_has_33_interfaces_and_joins_the_cluster(
    account: Account, deployed: Finished
) -> None:
    data = _launch_template(account)
    interfaces = data["NetworkInterfaces"]
    assert len(interfaces) == 33
    assert sum(interface["InterfaceType"].startswith("efa") for interface in interfaces) == 32
    assert {interface["NetworkCardIndex"] for interface in interfaces} == set(range(32))
    groups = {group for interface in interfaces for group in interface["Groups"]}
    known = account.client("ec2").describe_security_groups(GroupIds=sorted(groups))["SecurityGroups"]
    assert len(known) == 3
    cluster = account.client("eks").describe_cluster(name="holdfast")["cluster"]
    user_data = base64.b64decode(data["UserData"]).decode()
    assert cluster["endpoint"] in user_data
    assert cluster["certificateAuthority"]["data"] in user_data


def test_group_has_nodes_and_spares_and_never_replaces_them(account: Account, deployed: Finished) -> None:
    group = _group(account)
    assert (group["MinSize"], group["DesiredCapacity"], group["MaxSize"]) == (0, 3, 3)
    suspended = {process["ProcessName"] for process in group["SuspendedProcesses"]}
    assert suspended == {"AZRebalance", "ReplaceUnhealthy"}


def test_file_system_stands_in_the_subnet_of_the_nodes(account: Account, deployed: Finished) -> None:
    (file_system,) = account.client("fsx").describe_file_systems()["FileSystems"]
    assert file_system["StorageCapacity"] == 1200
    assert file_system["LustreConfiguration"]["DeploymentType"] == "SCRATCH_2"
    assert file_system["SubnetIds"] == [_group(account)["VPCZoneIdentifier"]]
    subnets = account.client("ec2").describe_subnets(SubnetIds=file_system["SubnetIds"])["Subnets"]
    assert (subnets[0]["AvailabilityZone"], subnets[0]["CidrBlock"]) == ("us-west-2b", "10.0.0.0/18")
    (association,) = account.client("fsx").describe_data_repository_associations()["Associations"]
    assert association["DataRepositoryPath"].startswith("s3://holdfast-storage-bucket")


def test_image_build_was_started(account: Account, deployed: Finished) -> None:
    (project,) = account.client("codebuild").list_projects()["projects"]
    assert len(account.client("codebuild").list_builds_for_project(projectName=project)["ids"]) == 1


def test_default_security_group_has_no_rules(account: Account, deployed: Finished) -> None:
    vpc_id = resource_id(account, "holdfast-network", "AWS::EC2::VPC")
    filters = [{"Name": "vpc-id", "Values": [vpc_id]}, {"Name": "group-name", "Values": ["default"]}]
    (group,) = account.client("ec2").describe_security_groups(Filters=filters)["SecurityGroups"]
    assert group["IpPermissions"] == group["IpPermissionsEgress"] == []


def test_in_cluster_software_is_applied(account: Account, deployed: Finished, objects: InCluster) -> None:
    assert objects.find("Namespace", "training")
    assert objects.find("ServiceAccount", "holdfast-training", namespace="training")
    for plugin in ("nvidia-device-plugin", "aws-efa-k8s-device-plugin"):
        assert objects.find("DaemonSet", plugin, namespace="kube-system"), plugin
    claim = objects.find("PersistentVolumeClaim", "holdfast-fsx", namespace="training")
    assert claim
    volume = objects.find("PersistentVolume", claim["spec"]["volumeName"])
    assert volume
    (file_system,) = account.client("fsx").describe_file_systems()["FileSystems"]
    assert volume["spec"]["csi"]["volumeHandle"] == file_system["FileSystemId"]
    assert volume["spec"]["csi"]["volumeAttributes"] == {
        "dnsname": file_system["DNSName"],
        "mountname": file_system["LustreConfiguration"]["MountName"],
    }


def test_outputs_are_what_a_job_is_rendered_from(account: Account, cdk: CdkCli, deployed: Finished) -> None:
    recipe = "training/recipes/llama3_8b_p5.toml"
    command = [sys.executable, "-m", "k8s", "render", recipe, "--outputs", str(cdk.outputs)]
    environment = {**os.environ, "PYTHONPATH": f"{_ROOT}:{_ROOT / 'constructs'}"}
    done = subprocess.run(
        command, cwd=_ROOT, env=environment, capture_output=True, text=True, timeout=60, check=False
    )
    assert done.returncode == 0, done.stderr
    images = {
        container["image"]
        for manifest in yaml.safe_load_all(done.stdout)
        if manifest["kind"] == "Job"
        for container in manifest["spec"]["template"]["spec"]["containers"]
    }
    registry = f"{ACCOUNT}.dkr.ecr.{REGION}.amazonaws.com/holdfast/"
    assert images
    assert all(image.startswith(registry) for image in images)


def test_same_deploy_changes_nothing(changes_of_same_deploy: list[Change]) -> None:
    assert changes_of_same_deploy == []


def test_node_count_changes_the_group_alone(
    account: Account, cdk: CdkCli, changes_of_third_node: list[Change]
) -> None:
    assert changes_of_third_node == [
        Change("holdfast-cluster", "AWS::AutoScaling::AutoScalingGroup", "UPDATE_COMPLETE")
    ]
    group = _group(account)
    assert (group["MinSize"], group["DesiredCapacity"], group["MaxSize"]) == (0, 4, 4)
    assert '"Nodes": "3"' in cdk.outputs.read_text()


def test_destroy_leaves_the_bucket_alone(account: Account, before: set[str], destroyed: Finished) -> None:
    assert destroyed.code == 0, destroyed.text
    assert statuses(account) == {"CDKToolkit": "CREATE_COMPLETE"}
    left = [name.rpartition("-")[0] for name in inventory(account) - before]
    assert left == ["s3 list_buckets holdfast-storage-bucket83908e77"]
    # of two deploys: one of secrets, one of alarms, each; and one of images, whose stack stood throughout
    assert len(keys(account, state="PendingDeletion")) == 5


def test_destroy_empties_the_cluster(destroyed: Finished, objects: InCluster) -> None:
    assert objects.find("Namespace", "training") is None
    assert objects.find("DaemonSet", "nvidia-device-plugin", namespace="kube-system") is None


def _group(account: Account) -> dict[str, Any]:
    (group,) = account.client("autoscaling").describe_auto_scaling_groups()["AutoScalingGroups"]
    found: dict[str, Any] = group
    return found


def _launch_template(account: Account) -> dict[str, Any]:
    template = _group(account)["LaunchTemplate"]
    versions = account.client("ec2").describe_launch_template_versions(
        LaunchTemplateId=template["LaunchTemplateId"], Versions=[template["Version"]]
    )
    data: dict[str, Any] = versions["LaunchTemplateVersions"][0]["LaunchTemplateData"]
    return data
