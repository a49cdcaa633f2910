"""What the stacks put into the cluster for every run; rendered on request, for clusters without them."""

from __future__ import annotations

from eks_training.training_namespace import SharedVolume, training_namespace
from k8s.pod import Manifest
from k8s.run import Run


def prerequisites(run: Run) -> list[Manifest]:
    """Return namespace, service accounts, volume and claim, as `cdk deploy` makes them."""
    outputs = run.outputs
    return training_namespace(
        namespace=outputs.namespace,
        volume=SharedVolume(
            file_system_id=outputs.file_system_id,
            dns_name=outputs.file_system_dns_name,
            mount_name=outputs.file_system_mount_name,
            capacity_gib=outputs.file_system_capacity_gib,
        ),
    )
