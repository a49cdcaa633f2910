"""What a training job finds in its namespace: service accounts and the shared volume. Pure data."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

Manifest = dict[str, Any]

TRAINING_SERVICE_ACCOUNT = "holdfast-training"
CONTROL_SERVICE_ACCOUNT = "holdfast-control"
CLAIM = "holdfast-fsx"


@dataclass(frozen=True, kw_only=True, slots=True)
class SharedVolume:
    """The Lustre file system as Kubernetes sees it."""

    file_system_id: str
    dns_name: str
    mount_name: str
    capacity_gib: int


def training_namespace(*, namespace: str, volume: SharedVolume) -> list[Manifest]:
    """Return namespace, service accounts, volume and claim, in the order of their creation."""
    return [
        _namespace(namespace),
        _service_account(TRAINING_SERVICE_ACCOUNT, namespace),
        _service_account(CONTROL_SERVICE_ACCOUNT, namespace),
        _volume(namespace, volume),
        _claim(namespace, volume),
    ]


def _namespace(name: str) -> Manifest:
    # training pods add IPC_LOCK for EFA, which "baseline" forbids (docs/operating.md, "Pod Security")
    labels = {
        "pod-security.kubernetes.io/enforce": "privileged",
        "pod-security.kubernetes.io/warn": "baseline",
    }
    return {"apiVersion": "v1", "kind": "Namespace", "metadata": {"name": name, "labels": labels}}


def _service_account(name: str, namespace: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": name, "namespace": namespace},
        # neither trainer nor control store calls the Kubernetes API
        "automountServiceAccountToken": False,
    }


def _volume(namespace: str, volume: SharedVolume) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": f"{namespace}-{CLAIM}"},
        "spec": {
            "capacity": {"storage": f"{volume.capacity_gib}Gi"},
            "accessModes": ["ReadWriteMany"],
            "volumeMode": "Filesystem",
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": "",
            "mountOptions": ["flock"],
            # nobody else's claim can bind it
            "claimRef": {"namespace": namespace, "name": CLAIM},
            "csi": {
                "driver": "fsx.csi.aws.com",
                "volumeHandle": volume.file_system_id,
                "volumeAttributes": {"dnsname": volume.dns_name, "mountname": volume.mount_name},
            },
        },
    }


def _claim(namespace: str, volume: SharedVolume) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": CLAIM, "namespace": namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": "",
            "volumeName": f"{namespace}-{CLAIM}",
            "resources": {"requests": {"storage": f"{volume.capacity_gib}Gi"}},
        },
    }
