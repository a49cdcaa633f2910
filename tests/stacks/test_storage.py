from __future__ import annotations

import json

import pytest

from tests.stacks.conftest import Deployment

LINK = "AWS::FSx::DataRepositoryAssociation"


def test_file_system_stands_in_the_training_subnet(default: Deployment) -> None:
    # WHEN
    [imported] = default.storage.one("AWS::FSx::FileSystem")["SubnetIds"]

    # THEN
    outputs = default.network.template["Outputs"].values()
    exports = {o["Export"]["Name"]: o["Value"] for o in outputs if "Export" in o}
    subnet = default.network.resources[exports[imported["Fn::ImportValue"]]["Ref"]]
    assert subnet["Properties"]["AvailabilityZone"] == "us-west-2b"
    assert subnet["Properties"]["CidrBlock"] == "10.0.0.0/18"


def test_security_group_is_complete_before_the_file_system(default: Deployment) -> None:
    # GIVEN it lives in a stack that is deployed first
    assert default.storage.all("AWS::EC2::SecurityGroup") == []
    assert default.stacks.network in default.stacks.storage.dependencies


def test_bucket_is_linked_on_request(default: Deployment, everything: Deployment) -> None:
    assert default.storage.all(LINK) == []
    assert everything.storage.one(LINK)["FileSystemPath"] == "/datasets"


def test_bucket_of_our_own_outlives_the_stack(everything: Deployment) -> None:
    # WHEN
    _, bucket = everything.storage.only("AWS::S3::Bucket")

    # THEN
    assert bucket["DeletionPolicy"] == "Retain"
    assert bucket["Properties"]["VersioningConfiguration"] == {"Status": "Enabled"}
    assert set(bucket["Properties"]["PublicAccessBlockConfiguration"].values()) == {True}


def test_build_makes_the_images_that_jobs_are_told_of(default: Deployment) -> None:
    # WHEN
    project = default.storage.one("AWS::CodeBuild::Project")
    variables = {v["Name"]: v["Value"] for v in project["Environment"]["EnvironmentVariables"]}

    # THEN
    outputs = default.storage.template["Outputs"]
    for name in ("TrainerImage", "ControlImage"):
        assert json.dumps(outputs[name]["Value"]).rstrip('"]}').endswith(f":{variables['TAG']}")


@pytest.mark.parametrize("kind", ["AWS::CodeBuild::Project", "Custom::StartImageBuild"])
def test_image_build_can_be_left_out(rendered: Deployment, kind: str) -> None:
    assert rendered.storage.all(kind) == []
    assert len(rendered.storage.all("AWS::ECR::Repository")) == 2


@pytest.mark.parametrize("stack", ["network", "storage", "cluster"])
def test_only_the_data_bucket_is_kept_on_purpose(everything: Deployment, stack: str) -> None:
    # WHEN
    resources = everything.template(stack).resources.values()

    # THEN
    kept = [r["Type"] for r in resources if r.get("DeletionPolicy") not in (None, "Delete")]
    assert kept == (["AWS::S3::Bucket"] if stack == "storage" else [])
