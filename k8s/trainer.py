"""The training Job: one pod a node, spares included, their addresses, and protection from drains."""

from __future__ import annotations

from k8s.network import CONTROL_PORT, control_address, network_environment, pod_sysctls
from k8s.pod import (
    RECIPE_FILE,
    Manifest,
    container,
    field_of,
    gpu_toleration,
    hub_environment,
    labels,
    metadata,
    pod_spec,
    training_mounts,
    training_node_terms,
    training_volumes,
    value_of,
)
from k8s.run import LOCAL_DISK, Run
from k8s.sizing import GRACE_MARGIN_SECONDS
from training import environment
from training.errors import EXIT_CONFIG, EXIT_RETRY, EXIT_SAME_STEP

CONTAINER = "trainer"
COMPONENT = "trainer"
DIRECTORY_ANNOTATION = "holdfast/run-directory"
JOB_NAME_LABEL = "batch.kubernetes.io/job-name"
INDEX_ANNOTATION = "batch.kubernetes.io/job-completion-index"

# `backoffLimit` is one budget and one doubling delay for a run of weeks; per index, both are the
# node's own. Restarts inside the pod use up neither (`training launch`).
_POD_FAILURES_PER_INDEX = 1000


def training_job(run: Run, *, name: str) -> Manifest:
    job: Manifest = {
        "apiVersion": "batch/v1",
        "kind": "Job",
        "metadata": metadata(run, name=name, owner=name, component=COMPONENT),
        "spec": {
            "completionMode": "Indexed",
            "completions": run.pods,
            "parallelism": run.pods,
            "backoffLimitPerIndex": _POD_FAILURES_PER_INDEX,
            "podReplacementPolicy": "Failed",
            "podFailurePolicy": {"rules": _pod_failure_rules()},
            # spares have nothing left to do once all nodes of the run are done
            "successPolicy": {"rules": [{"succeededCount": run.recipe.job.nodes}]},
            "ttlSecondsAfterFinished": run.recipe.kubernetes.ttl_seconds,
            "template": {
                "metadata": {"labels": labels(run, name=name, component=COMPONENT)},
                "spec": _pod(run, name=name),
            },
        },
    }
    job["metadata"]["annotations"] = {DIRECTORY_ANNOTATION: run.directory}
    if run.recipe.kubernetes.queue:
        job["metadata"]["labels"]["kueue.x-k8s.io/queue-name"] = run.recipe.kubernetes.queue
        job["spec"]["suspend"] = True  # Kueue admits a Job by resuming it
    return job


def training_service(run: Run, *, name: str) -> Manifest:
    """Return the headless Service that gives each pod its name, before it is ready too."""
    return {
        "apiVersion": "v1",
        "kind": "Service",
        "metadata": metadata(run, name=name, owner=name, component=COMPONENT),
        "spec": {
            "clusterIP": "None",
            "publishNotReadyAddresses": True,
            "selector": {JOB_NAME_LABEL: name},
        },
    }


def disruption_budget(run: Run, *, name: str) -> Manifest:
    """Return a budget that refuses every voluntary eviction of a running trainer."""
    return {
        "apiVersion": "policy/v1",
        "kind": "PodDisruptionBudget",
        "metadata": metadata(run, name=name, owner=name, component=COMPONENT),
        "spec": {
            # a Job has no scale subresource, so maxUnavailable could not be computed for it
            "minAvailable": run.pods,
            "selector": {"matchLabels": {JOB_NAME_LABEL: name}},
            "unhealthyPodEvictionPolicy": "AlwaysAllow",
        },
    }


def _pod_failure_rules() -> list[Manifest]:
    return [
        {
            "action": "Ignore",
            "onPodConditions": [{"type": "DisruptionTarget", "status": "True"}],
        },
        {
            "action": "FailJob",
            "onExitCodes": {
                "containerName": CONTAINER,
                "operator": "In",
                "values": [EXIT_CONFIG, EXIT_SAME_STEP],
            },
        },
    ]


def _pod(run: Run, *, name: str) -> Manifest:
    spec = pod_spec(
        run,
        service_account=run.outputs.training_service_account,
        grace_seconds=run.resources.grace_seconds,
        subdomain=name,
        restartPolicy="Never",
        tolerations=[gpu_toleration()],
        affinity={
            "nodeAffinity": {
                "requiredDuringSchedulingIgnoredDuringExecution": {
                    "nodeSelectorTerms": [{"matchExpressions": training_node_terms(run)}]
                }
            }
        },
        containers=[_container(run, name=name)],
        volumes=_volumes(run, name=name),
    )
    spec["securityContext"]["sysctls"] = pod_sysctls()
    return spec


def _container(run: Run, *, name: str) -> Manifest:
    command = ["python", "-m", "training", "launch", RECIPE_FILE, "--run-dir", run.directory]
    trainer = container(
        CONTAINER,
        run.image(run.outputs.trainer_image),
        command,
        env=_environment(run, name=name),
        resources=_resources(run),
        volumeMounts=[
            *training_mounts(run),
            {"name": "shm", "mountPath": "/dev/shm"},
            {"name": "local", "mountPath": LOCAL_DISK},
        ],
    )
    if run.recipe.kubernetes.lock_memory == "pod" and run.resources.efa_interfaces:
        trainer["securityContext"]["capabilities"]["add"] = ["IPC_LOCK"]
    if run.recipe.kubernetes.restart_in_place:
        codes = {"operator": "In", "values": [EXIT_RETRY]}
        trainer["restartPolicy"] = "Never"
        trainer["restartPolicyRules"] = [{"action": "Restart", "exitCodes": codes}]
    return trainer


def _environment(run: Run, *, name: str) -> list[Manifest]:
    return [
        value_of(environment.CONTROL, f"{control_address(run, name=name)}:{CONTROL_PORT}"),
        value_of(environment.RUN_ID, name),
        field_of(environment.NODE, "spec.nodeName"),
        field_of(environment.NODE_INDEX, f"metadata.annotations['{INDEX_ANNOTATION}']"),
        field_of(environment.ADDRESS, "status.podIP"),
        value_of(environment.GRACE_SECONDS, str(run.resources.grace_seconds - GRACE_MARGIN_SECONDS)),
        value_of("TORCHINDUCTOR_CACHE_DIR", f"{LOCAL_DISK}/inductor"),
        value_of("TRITON_CACHE_DIR", f"{LOCAL_DISK}/triton"),
        *hub_environment(run),
        *network_environment(run),
    ]


def _resources(run: Run) -> Manifest:
    sizes = run.resources
    limits: Manifest = {
        "nvidia.com/gpu": str(sizes.gpus),
        "vpc.amazonaws.com/efa": str(sizes.efa_interfaces),
        "memory": f"{sizes.memory_gib}Gi",
    }
    if sizes.hugepages_mib:
        limits["hugepages-2Mi"] = f"{sizes.hugepages_mib}Mi"
    requests = {"cpu": str(sizes.cpus), **limits}
    if sizes.local_disk_gib:  # else a node without its RAID would take the pod, and evict it later
        requests["ephemeral-storage"] = f"{sizes.local_disk_gib}Gi"
    return {"requests": requests, "limits": limits}


def _volumes(run: Run, *, name: str) -> list[Manifest]:
    disk = run.resources.local_disk_gib
    shm = {"medium": "Memory", "sizeLimit": f"{run.resources.shared_memory_gib}Gi"}
    return [
        *training_volumes(run, name=name),
        {"name": "shm", "emptyDir": shm},
        # kubelet's directory lies on the NVMe RAID of these nodes (node_user_data.py), so this needs
        # no hostPath, which Pod Security's "baseline" forbids; it lasts as long as the pod
        {"name": "local", "emptyDir": {"sizeLimit": f"{disk}Gi"} if disk else {}},
    ]
