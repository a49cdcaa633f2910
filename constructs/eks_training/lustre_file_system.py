"""The shared file system: FSx for Lustre SCRATCH_2."""

from __future__ import annotations

from aws_cdk import RemovalPolicy
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_fsx as fsx
from aws_cdk import aws_s3 as s3
from constructs import Construct

# the default, 2.10, cannot be mounted by AL2023 (kubernetes-sigs/aws-fsx-csi-driver#437)
LUSTRE_VERSION = "2.15"


class LustreFileSystem(Construct):
    """SCRATCH_2 in the subnet of the GPU nodes, compressed, optionally linked to a bucket.

    Scratch means: no replication and no backup. It goes with the stack.
    """

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        capacity_gib: int,
        subnet: ec2.ISubnet,
        security_group: ec2.ISecurityGroup,
    ) -> None:
        super().__init__(scope, construct_id)
        self.capacity_gib = capacity_gib
        self._file_system = fsx.CfnFileSystem(
            self,
            "FileSystem",
            file_system_type="LUSTRE",
            file_system_type_version=LUSTRE_VERSION,
            storage_type="SSD",
            storage_capacity=capacity_gib,
            subnet_ids=[subnet.subnet_id],
            security_group_ids=[security_group.security_group_id],
            lustre_configuration=fsx.CfnFileSystem.LustreConfigurationProperty(
                deployment_type="SCRATCH_2", data_compression_type="LZ4"
            ),
        )
        self._file_system.apply_removal_policy(RemovalPolicy.DESTROY)
        self.file_system_id = self._file_system.ref
        self.dns_name = self._file_system.attr_dns_name
        self.mount_name = self._file_system.attr_lustre_mount_name

    def link_bucket(self, bucket: s3.IBucket, *, prefix: str, path: str) -> None:
        """Show the keys of `bucket` under `path`, and export what is written there."""
        every_event = ["NEW", "CHANGED", "DELETED"]
        association = fsx.CfnDataRepositoryAssociation
        association(
            self,
            "DataRepository",
            file_system_id=self.file_system_id,
            file_system_path=path,
            data_repository_path=f"s3://{bucket.bucket_name}/{prefix}",
            batch_import_meta_data_on_create=True,
            s3=association.S3Property(
                auto_import_policy=association.AutoImportPolicyProperty(events=every_event),
                auto_export_policy=association.AutoExportPolicyProperty(events=every_event),
            ),
        )
