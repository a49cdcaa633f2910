"""EKS add-ons, in the order that works."""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Any

from aws_cdk import aws_eks_v2 as eks
from constructs import Construct, IDependable

from eks_training.instance_types import CNI_MINIMUM_IP_TARGET, CNI_WARM_IP_TARGET
from eks_training.node_user_data import GPU_TAINT_KEY
from eks_training.pod_identity import pod_identity_role

_TOLERATE_GPU_TAINT = {"key": GPU_TAINT_KEY, "operator": "Exists", "effect": "NoSchedule"}

# the CNI's default takes a whole interface of addresses, all 50 of a p5, before the first pod starts
_CNI_SETTINGS = {
    "env": {
        "WARM_ENI_TARGET": "0",
        "WARM_IP_TARGET": str(CNI_WARM_IP_TARGET),
        "MINIMUM_IP_TARGET": str(CNI_MINIMUM_IP_TARGET),
    }
}
# the agent tolerates every taint, its DCGM server none: GPU checks would silently not run
_NODE_MONITORING_SETTINGS = {"dcgmAgent": {"tolerations": [_TOLERATE_GPU_TAINT]}}


class ClusterAddons(Construct):
    """Add-ons that nodes need to become Ready, and add-ons that need Ready nodes.

    The second kind has Deployments: created before a node is there, CloudFormation waits for them until
    it gives up. Call `add_workload_addons` with the node group they run on.
    """

    def __init__(
        self, scope: Construct, construct_id: str, *, cluster: eks.ICluster, versions: Mapping[str, str]
    ) -> None:
        super().__init__(scope, construct_id)
        self._cluster = cluster
        self._versions = versions
        agent = self._addon("eks-pod-identity-agent")
        cni_role = pod_identity_role(self, "CniRole", policies=["AmazonEKS_CNI_Policy"])
        cni = self._addon(
            "vpc-cni", settings=_CNI_SETTINGS, service_account="aws-node", role_arn=cni_role.role_arn
        )
        cni.node.add_dependency(agent)
        self.before_nodes: tuple[IDependable, ...] = (agent, cni, self._addon("kube-proxy"))

    def add_workload_addons(self, *, after: IDependable) -> None:
        """Add DNS, the Lustre driver and node monitoring once `after` gives them nodes."""
        # A static volume needs no permission at all. With a role the controller learns its region, which
        # it cannot ask the node for: metadata is one hop too far for a pod.
        csi_role = pod_identity_role(self, "FsxCsiRole")
        addons = (
            self._addon("coredns"),
            self._addon(
                "aws-fsx-csi-driver", service_account="fsx-csi-controller-sa", role_arn=csi_role.role_arn
            ),
            self._addon("eks-node-monitoring-agent", settings=_NODE_MONITORING_SETTINGS),
        )
        for addon in addons:
            addon.node.add_dependency(after)

    def _addon(
        self,
        name: str,
        *,
        settings: Mapping[str, Any] | None = None,
        service_account: str = "",
        role_arn: str = "",
    ) -> eks.CfnAddon:
        identity = eks.CfnAddon.PodIdentityAssociationProperty(
            role_arn=role_arn, service_account=service_account
        )
        return eks.CfnAddon(
            self,
            name,
            cluster_name=self._cluster.cluster_name,
            addon_name=name,
            addon_version=self._versions.get(name),
            resolve_conflicts="OVERWRITE",
            configuration_values=json.dumps(settings, sort_keys=True) if settings else None,
            pod_identity_associations=[identity] if role_arn else None,
        )
