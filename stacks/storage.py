"""Storage: the Lustre file system, its S3 link, image repositories and the image build.

Its own stack, and early: a zone that lacks FSx for Lustre shows itself only when the file system is
created (aws-parallelcluster#2154), and then costs minutes, not a cluster.
"""

from __future__ import annotations

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_kms as kms
from aws_cdk import aws_s3 as s3
from aws_cdk import aws_s3_assets as assets
from constructs import Construct

from eks_training.image_build import ImageBuild, ImageRepositories
from eks_training.lustre_file_system import LustreFileSystem
from stacks import image_sources
from stacks.config import ClusterConfig, DataRepositoryConfig
from stacks.log_groups import log_group
from stacks.network import NetworkStack
from stacks.outputs import write_outputs


class StorageStack(cdk.Stack):
    """What jobs read and write: files and images."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        config: ClusterConfig,
        network: NetworkStack,
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, construct_id, **kwargs)
        self.file_system = LustreFileSystem(
            self,
            "Lustre",
            capacity_gib=config.storage.capacity_gib,
            subnet=network.training_subnet,
            security_group=network.lustre,
        )
        if config.storage.data_repository:
            self._link_bucket(config.storage.data_repository)
        tag = image_sources.image_tag()
        self._make_images(config, tag)
        outputs = {
            "FileSystemId": self.file_system.file_system_id,
            "FileSystemDnsName": self.file_system.dns_name,
            "FileSystemMountName": self.file_system.mount_name,
            "FileSystemCapacityGib": str(self.file_system.capacity_gib),
            "TrainerImage": self._images.uri("trainer", tag),
            "ControlImage": self._images.uri("control", tag),
        }
        write_outputs(self, outputs)

    def _link_bucket(self, repository: DataRepositoryConfig) -> None:
        if repository.bucket:
            bucket = s3.Bucket.from_bucket_name(self, "Bucket", repository.bucket)
        else:
            bucket = self._make_bucket()
        self.file_system.link_bucket(bucket, prefix=repository.prefix, path=repository.path)

    def _make_bucket(self) -> s3.Bucket:
        return s3.Bucket(
            self,
            "Bucket",
            encryption=s3.BucketEncryption.S3_MANAGED,
            block_public_access=s3.BlockPublicAccess.BLOCK_ALL,
            enforce_ssl=True,
            versioned=True,
            server_access_logs_prefix="access-logs/",
            # the only durable copy of what the scratch file system holds
            removal_policy=cdk.RemovalPolicy.RETAIN,
        )

    def _make_images(self, config: ClusterConfig, tag: str) -> None:
        key = kms.Key(
            self,
            "ImageKey",
            description="Container images and their builds",
            enable_key_rotation=True,
            removal_policy=cdk.RemovalPolicy.DESTROY,
        )
        self._images = ImageRepositories(self, "Images", prefix=config.name, encryption_key=key)
        if config.build_images:
            ImageBuild(
                self,
                "ImageBuild",
                repositories=self._images,
                source=self._image_source(tag),
                tag=tag,
                encryption_key=key,
                log_group=log_group(self, "BuildLogs", days=config.operations.log_retention_days),
            )

    def _image_source(self, tag: str) -> assets.Asset:
        with TemporaryDirectory() as folder:
            image_sources.copy_sources(Path(folder))
            # CDK copies the folder before it returns
            return assets.Asset(self, "ImageSource", path=folder, asset_hash=tag)
