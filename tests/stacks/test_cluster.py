from __future__ import annotations

import json
from typing import Any

import pytest

from k8s.outputs import parse_outputs
from tests.stacks.conftest import Deployment

APPLIED = "Custom::AWSCDK-EKS-KubernetesResource"
GROUP = "AWS::AutoScaling::AutoScalingGroup"
TEMPLATE = "AWS::EC2::LaunchTemplate"


def outputs(deployment: Deployment) -> dict[str, Any]:
    templates = (deployment.network, deployment.storage, deployment.cluster)
    written = [template.template["Outputs"] for template in templates]
    return {
        name: output["Value"] for stack in written for name, output in stack.items() if "Export" not in output
    }


def as_deployed(deployment: Deployment) -> dict[str, dict[str, str]]:
    """Outputs with a stand-in for each value that only AWS knows."""
    values = outputs(deployment)
    return {"stack": {k: v if isinstance(v, str) else "deployed" for k, v in values.items()}}


def gpu_template(deployment: Deployment) -> dict[str, Any]:
    found = [t["LaunchTemplateData"] for t in deployment.cluster.all(TEMPLATE)]
    [data] = [data for data in found if "NetworkInterfaces" in data]
    return dict(data)


def test_outputs_are_all_that_the_kubernetes_half_reads(default: Deployment) -> None:
    # WHEN
    parsed = parse_outputs(as_deployed(default))

    # THEN
    assert (parsed.nodes, parsed.spares, parsed.instance_type) == (2, 1, "p5.48xlarge")
    assert parsed.availability_zone == "us-west-2b"
    assert parsed.persistent_volume_claim == "holdfast-fsx"


def test_outputs_of_a_block_say_when_it_ends(everything: Deployment) -> None:
    parsed = parse_outputs(as_deployed(everything))

    assert (parsed.capacity_mode, parsed.capacity_end) == ("capacity-block", "2026-12-14T11:30:00Z")


def test_no_output_is_empty_and_none_stands_twice(default: Deployment) -> None:
    stacks = [default.network, default.storage, default.cluster]
    names = [n for s in stacks for n, o in s.template["Outputs"].items() if "Export" not in o]

    assert all(outputs(default).values())
    assert len(names) == len(set(names)) == 18


def test_service_accounts_and_claim_are_those_in_the_manifests(default: Deployment) -> None:
    # GIVEN
    manifests = str([r["Manifest"] for r in default.cluster.all(APPLIED)])
    values = outputs(default)

    # THEN
    for name in ("TrainingServiceAccount", "ControlServiceAccount", "PersistentVolumeClaim", "Namespace"):
        assert values[name] in manifests


def test_deploy_installs_plugins_and_namespace(default: Deployment) -> None:
    # WHEN
    texts = [json.dumps(r["Manifest"]) for r in default.cluster.all(APPLIED)]

    # THEN
    assert len(texts) == 2
    assert any("nvidia-device-plugin" in t and "aws-efa-k8s-device-plugin" in t for t in texts)
    assert any("PersistentVolumeClaim" in t and "fsx.csi.aws.com" in t for t in texts)


def test_switch_leaves_software_and_its_functions_out(rendered: Deployment) -> None:
    # WHEN
    functions = rendered.cluster.all("AWS::Lambda::Function")

    # THEN one is left: it suspends processes of the Auto Scaling group
    assert rendered.cluster.all(APPLIED) == []
    assert len(functions) == 1


def test_gpu_nodes_come_last_so_that_no_failure_costs_gpu_hours(default: Deployment) -> None:
    # WHEN
    waited = default.cluster.waits_for(GROUP)

    # THEN
    assert {APPLIED, "AWS::EKS::Addon", "AWS::EKS::Nodegroup", "AWS::EKS::AccessEntry"} <= waited


def test_group_holds_nodes_and_spares(default: Deployment) -> None:
    assert default.cluster.one(GROUP)["DesiredCapacity"] == "3"


def test_another_node_count_changes_the_group_alone(rendered: Deployment, larger: Deployment) -> None:
    # WHEN
    before, after = rendered.cluster.resources, larger.cluster.resources

    # THEN
    assert before.keys() == after.keys()
    assert [r["Type"] for name, r in after.items() if r != before[name]] == [GROUP]
    assert rendered.network.resources == larger.network.resources
    assert rendered.storage.resources == larger.storage.resources


def test_newest_image_is_resolved_by_the_deploy(default: Deployment) -> None:
    # WHEN
    reference = gpu_template(default)["ImageId"]["Ref"]

    # THEN
    parameter = default.cluster.template["Parameters"][reference]
    assert parameter["Type"] == "AWS::SSM::Parameter::Value<AWS::EC2::Image::Id>"
    assert parameter["Default"].endswith("1.36/amazon-linux-2023/x86_64/nvidia/recommended/image_id")


def test_image_can_be_pinned(everything: Deployment) -> None:
    assert gpu_template(everything)["ImageId"] == "ami-0123456789abcdef0"


def test_block_is_drained_by_schedule(everything: Deployment) -> None:
    action = everything.cluster.one("AWS::AutoScaling::ScheduledAction")

    assert (action["StartTime"], action["DesiredCapacity"]) == ("2026-12-14T10:30:00Z", 0)


def test_user_data_carries_the_service_network_of_the_cluster(default: Deployment) -> None:
    # WHEN
    user_data = json.dumps(gpu_template(default)["UserData"])
    network = default.cluster.one("AWS::EKS::Cluster")["KubernetesNetworkConfig"]

    # THEN
    assert f"cidr: {network['ServiceIpv4Cidr']}" in user_data
    assert "CertificateAuthorityData" in user_data


def test_interfaces_carry_cluster_efa_and_lustre_groups(default: Deployment) -> None:
    assert {len(i["Groups"]) for i in gpu_template(default)["NetworkInterfaces"]} == {3}


def test_admin_is_resolved_to_the_clusters_account(default: Deployment, everything: Deployment) -> None:
    # WHEN
    principals = [e["PrincipalArn"] for e in everything.cluster.all("AWS::EKS::AccessEntry")]

    # THEN
    assert "arn:aws:iam::111122223333:role/PlatformAdmin" in principals
    assert "AWS::AccountId" in str(default.cluster.all("AWS::EKS::AccessEntry"))


def test_control_plane_logs_end_with_the_stack(default: Deployment) -> None:
    # WHEN
    groups = default.cluster.all("AWS::Logs::LogGroup")

    # THEN EKS would make the group itself, without an end, and leave it
    [group] = [g for g in groups if g["LogGroupName"] == "/aws/eks/holdfast/cluster"]
    assert group["RetentionInDays"] == 90
    assert "AWS::Logs::LogGroup" in default.cluster.waits_for("AWS::EKS::Cluster")


def test_everything_is_tagged_for_its_bill(default: Deployment) -> None:
    tag = {"Key": "holdfast:cluster", "Value": "holdfast"}

    for kind in ("AWS::FSx::FileSystem", "AWS::ECR::Repository"):
        assert all(tag in r["Tags"] for r in default.storage.all(kind))
    assert tag in gpu_template(default)["TagSpecifications"][0]["Tags"]
    assert default.cluster.one("AWS::EKS::Cluster")["Tags"]


@pytest.mark.parametrize(
    "metric", ["StatusCheckFailed", "GroupInServiceInstances", "FreeDataStorageCapacity"]
)
def test_cluster_is_watched(default: Deployment, metric: str) -> None:
    assert metric in str(default.cluster.all("AWS::CloudWatch::Alarm"))


def test_budget_is_what_was_asked_for(default: Deployment) -> None:
    assert default.cluster.one("AWS::Budgets::Budget")["Budget"]["BudgetLimit"]["Amount"] == 20000
