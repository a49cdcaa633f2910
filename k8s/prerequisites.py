"""What the stacks put into the cluster for every run; rendered on request, for clusters without them."""

from __future__ import annotations

from k8s.pod import Manifest
from k8s.run import Run

_FSX_DRIVER = "fsx.csi.aws.com"
_STATIC = ""  # a storage class of no name: bound by hand, never provisioned


def prerequisites(run: Run) -> list[Manifest]:
    """Return namespace, service accounts, volume and claim."""
    return [
        namespace(run),
        service_account(run, run.outputs.training_service_account),
        service_account(run, run.outputs.control_service_account),
        persistent_volume(run),
        persistent_volume_claim(run),
    ]


def namespace(run: Run) -> Manifest:
    """Return the namespace, with Pod Security at the strictest level that its pods keep.

    EFA needs one thing beyond "baseline", the capability IPC_LOCK, unless the nodes lift the limit of
    locked memory themselves (kubernetes.lock_memory).
    """
    enforced = "privileged" if run.recipe.kubernetes.lock_memory == "pod" else "baseline"
    labels = {
        "pod-security.kubernetes.io/enforce": enforced,
        "pod-security.kubernetes.io/audit": "baseline",
    }
    return {
        "apiVersion": "v1",
        "kind": "Namespace",
        "metadata": {"name": run.outputs.namespace, "labels": labels},
    }


def service_account(run: Run, name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ServiceAccount",
        "metadata": {"name": name, "namespace": run.outputs.namespace},
        "automountServiceAccountToken": False,
    }


def persistent_volume(run: Run) -> Manifest:
    outputs = run.outputs
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolume",
        "metadata": {"name": volume_name(run)},
        "spec": {
            "capacity": {"storage": f"{outputs.file_system_capacity_gib}Gi"},
            "volumeMode": "Filesystem",
            "accessModes": ["ReadWriteMany"],
            "persistentVolumeReclaimPolicy": "Retain",
            "storageClassName": _STATIC,
            "claimRef": {"namespace": outputs.namespace, "name": outputs.persistent_volume_claim},
            "mountOptions": ["flock"],
            "csi": {
                "driver": _FSX_DRIVER,
                "volumeHandle": outputs.file_system_id,
                "volumeAttributes": {
                    "dnsname": outputs.file_system_dns_name,
                    "mountname": outputs.file_system_mount_name,
                },
            },
        },
    }


def persistent_volume_claim(run: Run) -> Manifest:
    outputs = run.outputs
    return {
        "apiVersion": "v1",
        "kind": "PersistentVolumeClaim",
        "metadata": {"name": outputs.persistent_volume_claim, "namespace": outputs.namespace},
        "spec": {
            "accessModes": ["ReadWriteMany"],
            "storageClassName": _STATIC,
            "volumeName": volume_name(run),
            "resources": {"requests": {"storage": f"{outputs.file_system_capacity_gib}Gi"}},
        },
    }


def volume_name(run: Run) -> str:
    return f"{run.outputs.namespace}-{run.outputs.persistent_volume_claim}"
