from __future__ import annotations

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_s3 as s3

from eks_training.lustre_file_system import LustreFileSystem
from tests.eks_training.template import Synthesised


@pytest.fixture
def file_system(stack: cdk.Stack, subnet: ec2.ISubnet, efa_group: ec2.ISecurityGroup) -> LustreFileSystem:
    return LustreFileSystem(stack, "Lustre", capacity_gib=2400, subnet=subnet, security_group=efa_group)


def test_file_system_is_scratch_2_that_al2023_can_mount(
    stack: cdk.Stack, file_system: LustreFileSystem
) -> None:
    # WHEN
    properties = Synthesised.of(stack).one("AWS::FSx::FileSystem")

    # THEN
    assert properties["LustreConfiguration"] == {"DeploymentType": "SCRATCH_2", "DataCompressionType": "LZ4"}
    assert properties["FileSystemTypeVersion"] == "2.15"
    assert properties["StorageCapacity"] == 2400
    assert properties["SubnetIds"] == ["subnet-1111aaaa"]


def test_file_system_goes_with_its_stack(stack: cdk.Stack, file_system: LustreFileSystem) -> None:
    # WHEN
    _, resource = Synthesised.of(stack).only("AWS::FSx::FileSystem")

    # THEN
    assert resource["DeletionPolicy"] == "Delete"


def test_linked_bucket_is_read_and_written(stack: cdk.Stack, file_system: LustreFileSystem) -> None:
    # GIVEN
    bucket = s3.Bucket.from_bucket_name(stack, "Bucket", "corpus")

    # WHEN
    file_system.link_bucket(bucket, prefix="tokens", path="/datasets")

    # THEN
    link = Synthesised.of(stack).one("AWS::FSx::DataRepositoryAssociation")
    every_event = ["NEW", "CHANGED", "DELETED"]
    assert link["DataRepositoryPath"] == "s3://corpus/tokens"
    assert link["FileSystemPath"] == "/datasets"
    assert link["S3"]["AutoImportPolicy"] == link["S3"]["AutoExportPolicy"] == {"Events": every_event}
