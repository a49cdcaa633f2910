"""The control pod of a run: the store outside all ranks, and the publisher of the run's status.

A one-pod Job on the system nodes. The store ends with 0 when the run is over. Its sidecar writes the
status into an annotation of the training Job, ends its pods before its capacity ends, and removes this
Job when the training Job has failed.
"""

from __future__ import annotations

from k8s.network import CONTROL_PORT, control_name
from k8s.pod import (
    RECIPE_FILE,
    Manifest,
    container,
    labels,
    metadata,
    node_in,
    pod_spec,
    recipe_mount,
    recipe_volume,
    shared_mount,
    shared_volume,
    value_of,
)
from k8s.run import Run
from training import environment

COMPONENT = "control"
GPU_NODE_LABEL = "nvidia.com/gpu.present"
_GRACE_SECONDS = 30
_CONTAINER_RESTARTS = 10_000  # a Job with restartPolicy OnFailure counts every one
_TOKEN_DIRECTORY = "/var/run/secrets/kubernetes.io/serviceaccount"
_TOKEN_SECONDS = 3600


def control_job(run: Run, *, name: str) -> Manifest:
    control = control_name(name)
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(run, name=control, owner=name, component=COMPONENT),
        "spec": {
            "completions": 1,
            "parallelism": 1,
            "backoffLimit": _CONTAINER_RESTARTS,
            "ttlSecondsAfterFinished": run.recipe.kubernetes.ttl_seconds,
            "template": {
                "metadata": {"labels": labels(run, name=name, component=COMPONENT)},
                "spec": _pod(run, name=name),
            },
        },
    }


def control_service(run: Run, *, name: str) -> Manifest:
    control = control_name(name)
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(run, name=control, owner=name, component=COMPONENT),
        "spec": {
            "clusterIP": "None",
            "selector": {"batch.kubernetes.io/job-name": control},
            "ports": [{"name": "store", "port": CONTROL_PORT}],
        },
    }


def publisher_role(run: Run, *, name: str) -> Manifest:
    """Return the only rights that a pod of the run has on the API."""
    control = control_name(name)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "Role",
        "metadata": metadata(run, name=control, owner=name, component=COMPONENT),
        "rules": [
            _rule("batch", "jobs", [name], ["get", "patch"]),
            _rule("batch", "jobs", [control], ["get", "delete"]),
        ],
    }


def publisher_role_binding(run: Run, *, name: str) -> Manifest:
    control = control_name(name)
    return {
        "apiVersion": "rbac.authorization.k8s.io/v1",
        "kind": "RoleBinding",
        "metadata": metadata(run, name=control, owner=name, component=COMPONENT),
        "roleRef": {"apiGroup": "rbac.authorization.k8s.io", "kind": "Role", "name": control},
        "subjects": [
            {
                "kind": "ServiceAccount",
                "name": run.outputs.control_service_account,
                "namespace": run.outputs.namespace,
            }
        ],
    }


def _rule(group: str, resource: str, names: list[str], verbs: list[str]) -> Manifest:
    return {"apiGroups": [group], "resources": [resource], "resourceNames": names, "verbs": verbs}


def _pod(run: Run, *, name: str) -> Manifest:
    # GPU nodes are tainted; the label also keeps it off untainted ones
    no_gpu = {"key": GPU_NODE_LABEL, "operator": "DoesNotExist"}
    same_zone = node_in("topology.kubernetes.io/zone", run.outputs.availability_zone)
    return pod_spec(
        run,
        service_account=run.outputs.control_service_account,
        grace_seconds=_GRACE_SECONDS,
        restartPolicy="OnFailure",
        affinity={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": [no_gpu]}]
                },
                "preferredDuringSchedulingIgnoredDuringExecution": [
                    {"weight": 100, "preference": {"matchExpressions": [same_zone]}}
                ],
            }
        },
        initContainers=[_publisher(run, name=name)],
        containers=[_store(run, name=name)],
        volumes=[recipe_volume(name), shared_volume(run), _token_volume()],
    )


def _store(run: Run, *, name: str) -> Manifest:
    port = ["--host", "0.0.0.0", "--port", str(CONTROL_PORT)]
    return container(
        COMPONENT,
        run.image(run.outputs.control_image),
        ["python", "-m", "training", "control", RECIPE_FILE, *port],
        env=[value_of(environment.RUN_ID, name), value_of("PYTHONUNBUFFERED", "1")],
        ports=[{"name": "store", "containerPort": CONTROL_PORT}],
        resources={"requests": {"cpu": "250m", "memory": "1Gi"}, "limits": {"memory": "2Gi"}},
        volumeMounts=[recipe_mount()],
    )


def _publisher(run: Run, *, name: str) -> Manifest:
    token = {"name": "api-token", "mountPath": _TOKEN_DIRECTORY, "readOnly": True}
    return container(
        "status",
        run.image(run.outputs.control_image),
        [
            *("python", "-m", "k8s", "publish", name, "--namespace", run.outputs.namespace),
            *("--recipe", RECIPE_FILE, "--run-dir", run.directory),
            *(("--stop-at", run.stop_at.isoformat()) if run.stop_at else ()),
        ],
        restartPolicy="Always",  # a sidecar: it ends with the store
        resources={"requests": {"cpu": "50m", "memory": "256Mi"}, "limits": {"memory": "512Mi"}},
        volumeMounts=[recipe_mount(), shared_mount(), token],
    )


def _token_volume() -> Manifest:
    """Return the volume that gives one container, not the pod, access to the API."""
    namespace = {"path": "namespace", "fieldRef": {"fieldPath": "metadata.namespace"}}
    authority = [{"key": "ca.crt", "path": "ca.crt"}]
    return {
        "name": "api-token",
        "projected": {
            "sources": [
                {"serviceAccountToken": {"path": "token", "expirationSeconds": _TOKEN_SECONDS}},
                {"configMap": {"name": "kube-root-ca.crt", "items": authority}},
                {"downwardAPI": {"items": [namespace]}},
            ]
        },
    }
