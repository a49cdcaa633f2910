"""Device plugins as plain DaemonSets: what makes GPUs and EFA devices requestable.

EKS has no add-on for them, and a chart cannot be fetched or proven offline. Settings follow the charts
nvidia-device-plugin 0.20.0 and aws-efa-k8s-device-plugin v0.5.30, except where they would not land on
tainted nodes. Pure data: `in_cluster_software.py` applies it, `stacks/render.py` writes it.
"""

from __future__ import annotations

from typing import Any

from eks_training.node_user_data import GPU_TAINT_KEY

Manifest = dict[str, Any]

NVIDIA_IMAGE = "nvcr.io/nvidia/k8s-device-plugin:v0.20.0"
EFA_IMAGE_ACCOUNT = "602401143452"
EFA_IMAGE_TAG = "v0.5.20"

_NAMESPACE = "kube-system"
_KUBELET_PLUGINS = "/var/lib/kubelet/device-plugins"
_TOLERATIONS = [
    {"key": "CriticalAddonsOnly", "operator": "Exists"},
    {"key": GPU_TAINT_KEY, "operator": "Exists", "effect": "NoSchedule"},
]


def device_plugins(*, instance_type: str, region: str, url_suffix: str) -> list[Manifest]:
    """Return the DaemonSets of both plugins for nodes of `instance_type`."""
    return [
        nvidia_device_plugin(instance_type=instance_type),
        efa_device_plugin(instance_type=instance_type, region=region, url_suffix=url_suffix),
    ]


def nvidia_device_plugin(*, instance_type: str) -> Manifest:
    """Return the DaemonSet that offers `nvidia.com/gpu`."""
    environment = {
        "FAIL_ON_INIT_ERROR": "true",
        "NVIDIA_VISIBLE_DEVICES": "all",
        "NVIDIA_DRIVER_CAPABILITIES": "compute,utility",
        # on, it would give every GPU container all EFA devices (k8s-device-plugin#1837)
        "MOFED_ENABLED": "false",
    }
    container = {
        "name": "nvidia-device-plugin",
        "image": NVIDIA_IMAGE,
        "imagePullPolicy": "IfNotPresent",
        "env": [{"name": name, "value": value} for name, value in environment.items()],
        "resources": {"requests": {"cpu": "10m", "memory": "64Mi"}, "limits": {"memory": "512Mi"}},
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        "volumeMounts": [{"name": "device-plugins", "mountPath": _KUBELET_PLUGINS}],
    }
    volumes = [_host_path("device-plugins", _KUBELET_PLUGINS)]
    return _daemon_set("nvidia-device-plugin", instance_type, {"containers": [container], "volumes": volumes})


def efa_device_plugin(*, instance_type: str, region: str, url_suffix: str) -> Manifest:
    """Return the DaemonSet that offers `vpc.amazonaws.com/efa`.

    The account holds in most commercial regions; opt-in regions have their own (EKS User Guide,
    "Amazon container image registries").
    """
    registry = f"{EFA_IMAGE_ACCOUNT}.dkr.ecr.{region}.{url_suffix}"
    container = {
        "name": "aws-efa-k8s-device-plugin",
        "image": f"{registry}/eks/aws-efa-k8s-device-plugin:{EFA_IMAGE_TAG}",
        "imagePullPolicy": "IfNotPresent",
        "resources": {"requests": {"cpu": "10m", "memory": "20Mi"}, "limits": {"memory": "128Mi"}},
        "securityContext": {"privileged": True, "runAsNonRoot": False, "runAsUser": 0},
        "volumeMounts": [
            {"name": "device-plugins", "mountPath": _KUBELET_PLUGINS},
            {"name": "infiniband", "mountPath": "/dev/infiniband"},
        ],
    }
    volumes = [_host_path("device-plugins", _KUBELET_PLUGINS), _host_path("infiniband", "/dev/infiniband")]
    pod = {"hostNetwork": True, "containers": [container], "volumes": volumes}
    return _daemon_set("aws-efa-k8s-device-plugin", instance_type, pod)


def _daemon_set(name: str, instance_type: str, pod: Manifest) -> Manifest:
    labels = {"app.kubernetes.io/name": name}
    defaults = {
        "automountServiceAccountToken": False,
        "priorityClassName": "system-node-critical",
        # the charts select by lists of types that a new type is not in, and then run nowhere in silence
        "nodeSelector": {"node.kubernetes.io/instance-type": instance_type},
        "tolerations": _TOLERATIONS,
    }
    return {
        "apiVersion": "apps/v1",
        "kind": "DaemonSet",
        "metadata": {"name": name, "namespace": _NAMESPACE, "labels": labels},
        "spec": {
            "selector": {"matchLabels": labels},
            "updateStrategy": {"type": "RollingUpdate"},
            "template": {"metadata": {"labels": labels}, "spec": {**defaults, **pod}},
        },
    }


def _host_path(name: str, path: str) -> Manifest:
    return {"name": name, "hostPath": {"path": path, "type": "Directory"}}
