"""Jobs of one pod around a run: tokenise the data before it, export the model after it."""

from __future__ import annotations

import math

from k8s.model_size import parameter_count
from k8s.pod import (
    RECIPE_FILE,
    Manifest,
    container,
    gpu_toleration,
    hub_environment,
    labels,
    metadata,
    pod_spec,
    training_mounts,
    training_node_terms,
    training_volumes,
)
from k8s.run import Run
from k8s.sizing import GIB
from training.errors import EXIT_CONFIG

_GRACE_SECONDS = 60
_RETRIES = 4


def preparation_job(run: Run, *, name: str) -> Manifest:
    """Return the Job that turns text into token shards; it goes on where a killed pod stopped."""
    command = ["python", "-m", "training", "prepare", RECIPE_FILE]
    return _job(run, name=name, component="prepare", command=command, memory="8Gi")


def export_job(run: Run, *, name: str) -> Manifest:
    """Return the Job that writes the newest checkpoint as safetensors beside the run."""
    command = ["python", "-m", "training", "export", run.directory]
    output = ["--output", f"{run.directory}/export"]
    return _job(run, name=name, component="export", command=[*command, *output], memory=_export_memory(run))


def _export_memory(run: Run) -> str:
    weights_bytes = 4 * parameter_count(run.recipe)
    # the full fp32 weights, and a copy of them while they are written
    return f"{math.ceil(2 * weights_bytes / GIB) + 4}Gi"


def _job(run: Run, *, name: str, component: str, command: list[str], memory: str) -> Manifest:
    on_config_error = {"containerName": component, "operator": "In", "values": [EXIT_CONFIG]}
    pod = pod_spec(
        run,
        service_account=run.outputs.training_service_account,
        grace_seconds=_GRACE_SECONDS,
        restartPolicy="Never",
        tolerations=[gpu_toleration()],
        affinity=_prefer_training_nodes(run),
        containers=[
            container(
                component,
                run.image(run.outputs.trainer_image),
                command,
                env=hub_environment(run),
                resources={"requests": {"cpu": "3", "memory": memory}, "limits": {"memory": memory}},
                volumeMounts=training_mounts(run),
            )
        ],
        volumes=training_volumes(run, name=name),
    )
    return {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(run, name=name, owner=name, component=component),
        "spec": {
            "backoffLimit": _RETRIES,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": [{"action": "FailJob", "onExitCodes": on_config_error}]},
            "ttlSecondsAfterFinished": run.recipe.kubernetes.ttl_seconds,
            "template": {
                "metadata": {"labels": labels(run, name=name, component=component)},
                "spec": pod,
            },
        },
    }


def _prefer_training_nodes(run: Run) -> Manifest:
    """Prefer GPU nodes: they are paid for, near the file system, and have many CPUs."""
    preference = {"matchExpressions": training_node_terms(run)}
    term = {"weight": 100, "preference": preference}
    return {"nodeAffinity": {"preferredDuringSchedulingIgnoredDuringExecution": [term]}}
