from __future__ import annotations

from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest
import yaml
from aws_cdk import aws_kms as kms
from aws_cdk import aws_logs as logs
from aws_cdk import aws_s3_assets as assets

from eks_training.image_build import TARGETS, ImageBuild, ImageRepositories
from tests.eks_training.template import Synthesised


@pytest.fixture
def template(stack: cdk.Stack, tmp_path: Path) -> Synthesised:
    (tmp_path / "file").write_text("content")
    key = kms.Key(stack, "Key")
    repositories = ImageRepositories(stack, "Images", prefix="holdfast", encryption_key=key)
    ImageBuild(
        stack,
        "Build",
        repositories=repositories,
        source=assets.Asset(stack, "Source", path=str(tmp_path)),
        tag="0123456789abcdef",
        encryption_key=key,
        log_group=logs.LogGroup(stack, "Logs"),
    )
    return Synthesised.of(stack)


def test_each_target_has_a_repository_that_keeps_what_was_pushed(template: Synthesised) -> None:
    # WHEN
    repositories = template.all("AWS::ECR::Repository")

    # THEN
    assert {r["RepositoryName"] for r in repositories} == {f"holdfast/{target}" for target in TARGETS}
    for repository in repositories:
        assert repository["ImageTagMutability"] == "IMMUTABLE"
        assert repository["ImageScanningConfiguration"] == {"ScanOnPush": True}
        assert repository["EncryptionConfiguration"]["EncryptionType"] == "KMS"
        assert "LifecyclePolicy" in repository


def test_build_names_targets_and_tag(template: Synthesised) -> None:
    # WHEN
    environment = template.one("AWS::CodeBuild::Project")["Environment"]

    # THEN
    variables = {v["Name"]: v["Value"] for v in environment["EnvironmentVariables"]}
    assert variables["TARGETS"] == "trainer control"
    assert variables["TAG"] == "0123456789abcdef"
    assert environment["PrivilegedMode"] is True


def test_build_tries_every_target_of_the_dockerfile(template: Synthesised) -> None:
    # GIVEN
    dockerfile = (Path(__file__).parents[2] / "training" / "Dockerfile").read_text()

    # WHEN
    spec = yaml.safe_load(template.one("AWS::CodeBuild::Project")["Source"]["BuildSpec"])

    # THEN
    [script] = spec["phases"]["build"]["commands"]
    assert "--file training/Dockerfile" in script
    assert all(f" AS {target}\n" in dockerfile for target in TARGETS)


def test_deploy_starts_the_build_when_the_sources_change(template: Synthesised) -> None:
    # WHEN
    start: Any = template.one("Custom::StartImageBuild")

    # THEN the call is part of the resource, so another tag is an update
    assert "0123456789abcdef" in str(start["Create"])
    assert start["Create"] == start["Update"]
    assert "AWS::CodeBuild::Project" in template.waits_for("Custom::StartImageBuild")


def test_build_can_push_and_read_but_not_administer(template: Synthesised) -> None:
    # WHEN
    actions = template.actions()

    # THEN
    assert "ecr:PutImage" in actions
    assert not [action for action in actions if action.endswith("*")]
    assert not {"ecr:DeleteRepository", "ecr:BatchDeleteImage", "kms:*"} & actions
