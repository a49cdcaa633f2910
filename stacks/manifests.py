"""What is installed in the cluster, as groups of manifests. Imports no aws_cdk."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from eks_training.device_plugins import device_plugins
from eks_training.training_namespace import SharedVolume, training_namespace
from stacks.config import ClusterConfig


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterValues:
    """What is known only once the stacks stand. CDK tokens before that."""

    region: str
    url_suffix: str
    """Domain of AWS services, such as amazonaws.com."""
    file_system_id: str
    file_system_dns_name: str
    file_system_mount_name: str


def manifest_groups(config: ClusterConfig, values: ClusterValues) -> dict[str, list[dict[str, Any]]]:
    """Return {name of a group: its manifests, in the order to apply them}."""
    volume = SharedVolume(
        file_system_id=values.file_system_id,
        dns_name=values.file_system_dns_name,
        mount_name=values.file_system_mount_name,
        capacity_gib=config.storage.capacity_gib,
    )
    return {
        "device-plugins": device_plugins(
            instance_type=config.gpu.instance_type, region=values.region, url_suffix=values.url_suffix
        ),
        "training-namespace": training_namespace(namespace=config.namespace, volume=volume),
    }
