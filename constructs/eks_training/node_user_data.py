"""User data of a self-managed AL2023 GPU node: NodeConfig for nodeadm, and the Lustre client.

Pure text, so that a golden file can show it. nodeadm's API: awslabs/amazon-eks-ami, nodeadm/doc/api.md.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from eks_training.node_shutdown import CRITICAL_POD_SHUTDOWN_SECONDS, POD_SHUTDOWN_SECONDS

GPU_TAINT_KEY = "nvidia.com/gpu"
POOL_LABEL = "holdfast.dev/pool"
TRAINING_POOL = "training"
SYSTEM_POOL = "system"

# nodeadm names pods by the interfaces of card 0, one of which the EFA device takes (instance_types.py)
_MAX_PODS_EXPRESSION = "((default_enis - 1) * (ips_per_eni - 1)) + 2"
_BOUNDARY = "==HOLDFAST=="

# Fail soft: the CSI driver brings its own mount helper, so a node without the package still trains.
# Module options: EKS User Guide, "Optimize FSx for Lustre performance on nodes (non-EFA)".
_LUSTRE_CLIENT = """\
#!/bin/bash
cat >/etc/modprobe.d/lustre.conf <<'OPTIONS'
options ptlrpc ptlrpcd_per_cpt_max=64
options ksocklnd credits=2560
OPTIONS
timeout 180 dnf install -y lustre-client ||
  logger -t holdfast "lustre-client was not installed: no lfs on this node, volumes still mount through CSI"
exit 0
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class NodeUserData:
    """What a node must know to join."""

    cluster_name: str
    api_server_endpoint: str
    certificate_authority: str
    """Base64, as EKS gives it."""
    service_cidr: str
    labels: Mapping[str, str] = field(default_factory=dict)
    """Node labels on top of those that device plugins need."""

    def render(self) -> str:
        """Return the multi-part MIME document, not yet base64."""
        parts = (
            ("application/node.eks.aws", _to_yaml(self._node_config())),
            ('text/x-shellscript; charset="us-ascii"', _LUSTRE_CLIENT),
        )
        head = f'MIME-Version: 1.0\nContent-Type: multipart/mixed; boundary="{_BOUNDARY}"\n'
        body = "".join(f"\n--{_BOUNDARY}\nContent-Type: {kind}\n\n{text}" for kind, text in parts)
        return f"{head}{body}\n--{_BOUNDARY}--\n"

    def _node_config(self) -> dict[str, Any]:
        cluster = {
            "name": self.cluster_name,
            "apiServerEndpoint": self.api_server_endpoint,
            "certificateAuthority": self.certificate_authority,
            "cidr": self.service_cidr,
        }
        # nodeadm sets the gpu.present label itself on kubelet >= 1.35 only; without it no plugin lands
        labels = {"nvidia.com/gpu.present": "true", POOL_LABEL: TRAINING_POOL, **self.labels}
        node_labels = ",".join(f"{key}={value}" for key, value in labels.items())
        kubelet = {
            "maxPodsExpression": _MAX_PODS_EXPRESSION,
            "config": {
                "shutdownGracePeriod": f"{POD_SHUTDOWN_SECONDS + CRITICAL_POD_SHUTDOWN_SECONDS}s",
                "shutdownGracePeriodCriticalPods": f"{CRITICAL_POD_SHUTDOWN_SECONDS}s",
            },
            "flags": [
                f"--node-labels={node_labels}",
                f"--register-with-taints={GPU_TAINT_KEY}=true:NoSchedule",
            ],
        }
        return {
            "apiVersion": "node.eks.aws/v1alpha1",
            "kind": "NodeConfig",
            "spec": {
                "cluster": cluster,
                "instance": {"localStorage": {"strategy": "RAID0"}},
                "kubelet": kubelet,
            },
        }


def _to_yaml(document: Mapping[str, Any]) -> str:
    # CDK tokens must not be folded over lines
    return yaml.safe_dump(document, sort_keys=False, width=1 << 20)
