"""Manifests that the deploy applies through CDK's kubectl provider."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

from aws_cdk import aws_eks_v2 as eks
from constructs import Construct, IDependable


class InClusterSoftware(Construct):
    """Groups of manifests, each applied, pruned and deleted as one."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        cluster: eks.ICluster,
        groups: Mapping[str, Sequence[dict[str, Any]]],
        after: IDependable,
    ) -> None:
        super().__init__(scope, construct_id)
        for name, manifests in groups.items():
            applied = eks.KubernetesManifest(
                self,
                name,
                cluster=cluster,
                manifest=list(manifests),
                # a namespace of that name may be there already
                overwrite=True,
            )
            applied.node.add_dependency(after)
