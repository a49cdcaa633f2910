"""Cluster: EKS, its nodes and add-ons, what runs in it, alarms, and the outputs that `k8s/` reads."""

from __future__ import annotations

from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_eks_v2 as eks
from aws_cdk import aws_ssm as ssm
from constructs import Construct

from eks_training.capacity import Capacity
from eks_training.cluster_addons import ClusterAddons
from eks_training.gpu_node_group import GpuNodeGroup, NodeSettings
from eks_training.in_cluster_software import InClusterSoftware
from eks_training.node_user_data import NodeUserData
from eks_training.system_node_group import SystemNodeGroup
from eks_training.training_alarms import AlarmTopic, TrainingAlarms, monthly_budget
from eks_training.training_cluster import TrainingCluster
from eks_training.training_namespace import CLAIM, CONTROL_SERVICE_ACCOUNT, TRAINING_SERVICE_ACCOUNT
from stacks.config import CapacityConfig, ClusterConfig
from stacks.log_groups import log_group
from stacks.manifests import ClusterValues, manifest_groups
from stacks.network import NetworkStack
from stacks.outputs import write_outputs
from stacks.storage import StorageStack
from stacks.tags import cluster_tag, tags

_GPU_IMAGE_PARAMETER = (
    "/aws/service/eks/optimized-ami/{version}/amazon-linux-2023/x86_64/nvidia/recommended/image_id"
)


class ClusterStack(cdk.Stack):
    """The cluster that a training job is applied to."""

    def __init__(
        self,
        scope: Construct,
        construct_id: str,
        *,
        config: ClusterConfig,
        network: NetworkStack,
        storage: StorageStack,
        **kwargs: Any,
    ) -> None:
        super().__init__(scope, construct_id, **kwargs)
        self._config, self._network, self._storage = config, network, storage
        self._topic = AlarmTopic(self, "Alarms", email=config.operations.alarm_email).topic
        self._cluster = self._make_cluster()
        addons = ClusterAddons(self, "Addons", cluster=self._cluster, versions=config.addon_versions)
        system = self._make_system_nodes(addons)
        addons.add_workload_addons(after=system)
        last: list[Construct] = [addons, system]
        if config.in_cluster_software == "apply":
            last.append(self._apply_manifests(after=addons))
        gpu = self._make_gpu_nodes()
        # last, so that nothing which fails before costs GPU hours; and first to go
        gpu.node.add_dependency(*last)
        self._watch(gpu)
        self._write_outputs()

    def _make_cluster(self) -> eks.ICluster:
        config = self._config
        logs = log_group(
            self,
            "ControlPlaneLogs",
            name=f"/aws/eks/{config.name}/cluster",
            days=config.operations.log_retention_days,
        )
        training_cluster = TrainingCluster(
            self,
            "Eks",
            name=config.name,
            version=config.kubernetes_version,
            support=config.support,
            vpc=self._network.vpc,
            subnets=self._network.cluster_subnets,
            service_cidr=config.network.service_cidr,
            public_cidrs=config.access.public_cidrs,
            installs_software=config.in_cluster_software == "apply",
        )
        training_cluster.node.add_dependency(logs)
        for principal in config.access.admins:
            training_cluster.add_admin(self._principal_arn(principal))
        return training_cluster.cluster

    def _principal_arn(self, principal: str) -> str:
        if principal.startswith("arn:"):
            return principal
        return f"arn:{self.partition}:iam::{self.account}:{principal}"

    def _make_system_nodes(self, addons: ClusterAddons) -> SystemNodeGroup:
        nodes = SystemNodeGroup(
            self,
            "SystemNodes",
            cluster=self._cluster,
            subnet=self._network.training_subnet,
            # data preparation and export run here and read the file system
            security_groups=[self._network.lustre],
            instance_type=self._config.system.instance_type,
            nodes=self._config.system.nodes,
            tags=tags(self._config),
        )
        nodes.node.add_dependency(*addons.before_nodes)
        return nodes

    def _make_gpu_nodes(self) -> GpuNodeGroup:
        gpu, cluster = self._config.gpu, self._cluster
        user_data = NodeUserData(
            cluster_name=cluster.cluster_name,
            api_server_endpoint=cluster.cluster_endpoint,
            certificate_authority=cluster.cluster_certificate_authority_data,
            service_cidr=self._config.network.service_cidr,
        )
        return GpuNodeGroup(
            self,
            "GpuNodes",
            cluster=cluster,
            subnet=self._network.training_subnet,
            security_groups=[self._network.efa, self._network.lustre],
            nodes=NodeSettings(
                instance=gpu.instance,
                image_id=gpu.ami_id or self._newest_image(),
                user_data=user_data.render(),
                root_volume_gib=gpu.root_volume_gib,
                tags={"Name": f"{self._config.name}-gpu", **tags(self._config)},
            ),
            size=gpu.group_size,
            parked=gpu.parked,
            capacity=_capacity(gpu.capacity),
            notification_topic_arn=self._topic.topic_arn,
        )

    def _newest_image(self) -> str:
        # a template parameter, resolved at each deploy: synth asks nobody
        return ssm.StringParameter.value_for_typed_string_parameter_v2(
            self,
            _GPU_IMAGE_PARAMETER.format(version=self._config.kubernetes_version),
            ssm.ParameterValueType.AWS_EC2_IMAGE_ID,
        )

    def _apply_manifests(self, *, after: Construct) -> InClusterSoftware:
        file_system = self._storage.file_system
        values = ClusterValues(
            region=self.region,
            url_suffix=self.url_suffix,
            file_system_id=file_system.file_system_id,
            file_system_dns_name=file_system.dns_name,
            file_system_mount_name=file_system.mount_name,
        )
        groups = manifest_groups(self._config, values)
        return InClusterSoftware(self, "Software", cluster=self._cluster, groups=groups, after=after)

    def _watch(self, gpu: GpuNodeGroup) -> None:
        config, file_system = self._config, self._storage.file_system
        alarms = TrainingAlarms(self, "TrainingAlarms", topic=self._topic)
        alarms.watch_nodes(group_name=gpu.group_name)
        alarms.watch_file_system(
            file_system_id=file_system.file_system_id, capacity_gib=file_system.capacity_gib
        )
        if config.operations.monthly_budget_usd:
            monthly_budget(
                self,
                "Budget",
                name=config.name,
                usd=config.operations.monthly_budget_usd,
                tag=cluster_tag(config),
                topic=self._topic,
            )

    def _write_outputs(self) -> None:
        config = self._config
        outputs = {
            "ClusterName": config.name,
            "InstanceType": config.gpu.instance_type,
            "Nodes": str(config.gpu.nodes),
            "Spares": str(config.gpu.spares),
            "Namespace": config.namespace,
            "TrainingServiceAccount": TRAINING_SERVICE_ACCOUNT,
            "ControlServiceAccount": CONTROL_SERVICE_ACCOUNT,
            "PersistentVolumeClaim": CLAIM,
            "CapacityMode": config.gpu.capacity.mode,
            "CapacityEnd": config.gpu.capacity.end,
            "KubernetesVersion": config.kubernetes_version,
        }
        write_outputs(self, outputs)


def _capacity(config: CapacityConfig) -> Capacity:
    drain_at = config.drain_at
    return Capacity(
        mode=config.mode,
        reservation_id=config.reservation_id,
        placement_group=config.placement_group,
        start=config.start,
        drain_at=drain_at.strftime("%Y-%m-%dT%H:%M:%SZ") if drain_at else "",
    )
