"""Device plugins and namespace: pure data, checked against every supported version of Kubernetes."""

from __future__ import annotations

import re
from typing import Any

import kubernetes_validate
import pytest

from eks_training.device_plugins import device_plugins, efa_device_plugin, nvidia_device_plugin
from eks_training.instance_types import INSTANCE_TYPES
from eks_training.training_namespace import CLAIM, SharedVolume, training_namespace

VOLUME = SharedVolume(
    file_system_id="fs-0123456789abcdef0",
    dns_name="fs-0123456789abcdef0.fsx.us-west-2.amazonaws.com",
    mount_name="abcd1234",
    capacity_gib=2400,
)
PLUGINS = device_plugins(instance_type="p5.48xlarge", region="us-west-2", url_suffix="amazonaws.com")
NAMESPACE = training_namespace(namespace="training", volume=VOLUME)


def pod_of(daemon_set: dict[str, Any]) -> dict[str, Any]:
    pod: dict[str, Any] = daemon_set["spec"]["template"]["spec"]
    return pod


def of_kind(kind: str) -> dict[str, Any]:
    [found] = [manifest for manifest in NAMESPACE if manifest["kind"] == kind]
    return found


@pytest.mark.parametrize("version", ["1.32", "1.33", "1.34", "1.35", "1.36"])
def test_manifests_are_valid(version: str) -> None:
    for manifest in [*PLUGINS, *NAMESPACE]:
        kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin["metadata"]["name"])
def test_plugins_land_on_tainted_training_nodes_only(plugin: dict[str, Any]) -> None:
    # WHEN
    pod = pod_of(plugin)

    # THEN
    assert {"key": "nvidia.com/gpu", "operator": "Exists", "effect": "NoSchedule"} in pod["tolerations"]
    assert pod["nodeSelector"] == {"node.kubernetes.io/instance-type": "p5.48xlarge"}
    assert pod["priorityClassName"] == "system-node-critical"


@pytest.mark.parametrize("instance_type", INSTANCE_TYPES)
def test_every_type_of_the_table_is_selected(instance_type: str) -> None:
    # the charts' lists of known types leave a new one with DESIRED 0 and no message
    for plugin in device_plugins(instance_type=instance_type, region="r", url_suffix="s"):
        assert pod_of(plugin)["nodeSelector"]["node.kubernetes.io/instance-type"] == instance_type


@pytest.mark.parametrize("plugin", PLUGINS, ids=lambda plugin: plugin["metadata"]["name"])
def test_images_are_pinned(plugin: dict[str, Any]) -> None:
    [container] = pod_of(plugin)["containers"]

    assert re.search(r":v\d+\.\d+\.\d+$", container["image"])


def test_nvidia_plugin_leaves_efa_devices_alone() -> None:
    [container] = pod_of(nvidia_device_plugin(instance_type="p5.48xlarge"))["containers"]

    assert {"name": "MOFED_ENABLED", "value": "false"} in container["env"]


def test_efa_plugin_is_pulled_from_the_clusters_region() -> None:
    plugin = efa_device_plugin(
        instance_type="p5.48xlarge", region="cn-north-1", url_suffix="amazonaws.com.cn"
    )

    [container] = pod_of(plugin)["containers"]
    assert container["image"].startswith("602401143452.dkr.ecr.cn-north-1.amazonaws.com.cn/eks/")


def test_volume_is_the_file_system_and_only_our_claim_binds_it() -> None:
    # WHEN
    volume, claim = of_kind("PersistentVolume"), of_kind("PersistentVolumeClaim")

    # THEN
    assert volume["spec"]["csi"] == {
        "driver": "fsx.csi.aws.com",
        "volumeHandle": "fs-0123456789abcdef0",
        "volumeAttributes": {"dnsname": VOLUME.dns_name, "mountname": "abcd1234"},
    }
    assert volume["spec"]["claimRef"] == {"namespace": "training", "name": CLAIM}
    assert claim["spec"]["volumeName"] == volume["metadata"]["name"]
    assert claim["spec"]["resources"]["requests"] == volume["spec"]["capacity"] == {"storage": "2400Gi"}


def test_volume_outlives_its_claim_and_locks_files() -> None:
    spec = of_kind("PersistentVolume")["spec"]

    assert spec["persistentVolumeReclaimPolicy"] == "Retain"
    assert spec["mountOptions"] == ["flock"]


def test_namespace_comes_first_and_admits_what_training_needs() -> None:
    assert NAMESPACE[0]["kind"] == "Namespace"
    assert NAMESPACE[0]["metadata"]["labels"]["pod-security.kubernetes.io/enforce"] == "privileged"


def test_no_token_is_mounted_unasked() -> None:
    accounts = [manifest for manifest in NAMESPACE if manifest["kind"] == "ServiceAccount"]

    assert {a["metadata"]["name"] for a in accounts} == {"holdfast-training", "holdfast-control"}
    assert all(a["automountServiceAccountToken"] is False for a in accounts)
