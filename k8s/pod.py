"""What the pods of all Holdfast Jobs have in common."""

from __future__ import annotations

from typing import Any

from k8s.run import SHARED_FILE_SYSTEM, Run

Manifest = dict[str, Any]

RECIPE_DIRECTORY = "/etc/holdfast"
RECIPE_FILE = f"{RECIPE_DIRECTORY}/recipe.toml"
TOKEN_DIRECTORY = "/etc/holdfast-token"
GPU_TAINT = "nvidia.com/gpu"
UNREACHABLE_SECONDS = 30  # NVRx has replaced the node long before; this frees the pod's index

RUN_LABEL = "holdfast/run"
COMPONENT_LABEL = "app.kubernetes.io/component"
INSTANCE_LABEL = "app.kubernetes.io/instance"


def labels(run: Run, *, name: str, component: str) -> dict[str, str]:
    """Return the labels of an object that belongs to the Job `name`."""
    return {
        "app.kubernetes.io/name": "holdfast",
        INSTANCE_LABEL: name,
        COMPONENT_LABEL: component,
        RUN_LABEL: run.recipe.job.name,
    }


def metadata(run: Run, *, name: str, owner: str, component: str, **fields: Any) -> Manifest:
    """Return the metadata of the object `name` that belongs to the Job `owner`."""
    return {
        "name": name,
        "namespace": run.outputs.namespace,
        "labels": labels(run, name=owner, component=component),
        **fields,
    }


def recipe_config_map(run: Run, *, name: str) -> Manifest:
    return {
        "apiVersion": "v1",
        "kind": "ConfigMap",
        "metadata": metadata(run, name=recipe_name(name), owner=name, component="recipe"),
        "immutable": True,
        "data": {"recipe.toml": run.recipe_text},
    }


def recipe_name(job: str) -> str:
    return f"{job}-recipe"


def pod_spec(run: Run, *, service_account: str, grace_seconds: int, **fields: Any) -> Manifest:
    """Return what every pod has: identity without a token, eviction times, pull secret."""
    spec: Manifest = {
        "serviceAccountName": service_account,
        "automountServiceAccountToken": False,
        "enableServiceLinks": False,
        "terminationGracePeriodSeconds": grace_seconds,
        "securityContext": {"seccompProfile": {"type": "RuntimeDefault"}},
        **fields,
    }
    spec["tolerations"] = [*fields.get("tolerations", ()), *_eviction_tolerations()]
    if run.recipe.kubernetes.image_pull_secret:
        spec["imagePullSecrets"] = [{"name": run.recipe.kubernetes.image_pull_secret}]
    return spec


def gpu_toleration() -> Manifest:
    return {"key": GPU_TAINT, "operator": "Exists", "effect": "NoSchedule"}


def training_node_terms(run: Run) -> list[Manifest]:
    """Return the match expressions of the nodes that train."""
    return [
        node_in("node.kubernetes.io/instance-type", run.instance.name),
        node_in("topology.kubernetes.io/zone", run.outputs.availability_zone),
    ]


def node_in(label: str, value: str) -> Manifest:
    return {"key": label, "operator": "In", "values": [value]}


def container(name: str, image: str, command: list[str], **fields: Any) -> Manifest:
    """Return a container without privileges that runs `command` without a shell."""
    return {
        "name": name,
        "image": image,
        "imagePullPolicy": "IfNotPresent",
        "command": command,
        "securityContext": {"allowPrivilegeEscalation": False, "capabilities": {"drop": ["ALL"]}},
        **fields,
    }


def value_of(name: str, value: str) -> Manifest:
    return {"name": name, "value": value}


def field_of(name: str, path: str) -> Manifest:
    return {"name": name, "valueFrom": {"fieldRef": {"fieldPath": path}}}


def recipe_volume(name: str) -> Manifest:
    return {"name": "recipe", "configMap": {"name": recipe_name(name)}}


def recipe_mount() -> Manifest:
    return {"name": "recipe", "mountPath": RECIPE_DIRECTORY, "readOnly": True}


def shared_volume(run: Run) -> Manifest:
    return {"name": "fsx", "persistentVolumeClaim": {"claimName": run.outputs.persistent_volume_claim}}


def shared_mount() -> Manifest:
    return {"name": "fsx", "mountPath": SHARED_FILE_SYSTEM}


def training_volumes(run: Run, *, name: str) -> list[Manifest]:
    """Return the volumes of recipe, shared file system and hub token."""
    secret = run.recipe.kubernetes.token_secret
    token = {"secretName": secret, "optional": True, "defaultMode": 0o400}
    return [
        recipe_volume(name),
        shared_volume(run),
        *([{"name": "token", "secret": token}] if secret else []),
    ]


def training_mounts(run: Run) -> list[Manifest]:
    token = {"name": "token", "mountPath": TOKEN_DIRECTORY, "readOnly": True}
    return [recipe_mount(), shared_mount(), *([token] if run.recipe.kubernetes.token_secret else [])]


def hub_environment(run: Run) -> list[Manifest]:
    """Return where Hugging Face libraries keep their cache and find the token."""
    variables = [
        value_of("HF_HOME", f"{SHARED_FILE_SYSTEM}/cache/huggingface"),
        value_of("PYTHONUNBUFFERED", "1"),
    ]
    if run.recipe.kubernetes.token_secret:
        variables.append(value_of("HF_TOKEN_PATH", f"{TOKEN_DIRECTORY}/token"))
    return variables


def _eviction_tolerations() -> list[Manifest]:
    return [
        {
            "key": f"node.kubernetes.io/{condition}",
            "operator": "Exists",
            "effect": "NoExecute",
            "tolerationSeconds": UNREACHABLE_SECONDS,
        }
        for condition in ("not-ready", "unreachable")
    ]
