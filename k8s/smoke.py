"""The smoke Job of `k8s doctor --smoke`: real pods, the shared mount, NCCL over EFA, versions.

It is the training Job of a recipe with another command, so what passes here is what training gets.
"""

from __future__ import annotations

import json
import time
from collections.abc import Iterator, Mapping
from typing import Any

import yaml

from k8s import jobs, trainer
from k8s.findings import Finding, fail, ok, warn
from k8s.kubectl import Kubectl
from k8s.manifests import job_name
from k8s.network import SMOKE_PORT
from k8s.pod import Manifest, recipe_config_map
from k8s.run import SHARED_FILE_SYSTEM, Run
from training import environment
from training.nvrx_version import KNOWN_VERSIONS

MARK = "holdfast-smoke"  # of the result line; training/smoke.py writes it
_SIZE_MIB = 1024
_WAIT_SECONDS = 1200
_POLL_SECONDS = 5.0
_GRACE_SECONDS = 30
# of the table's bandwidth: an all-reduce between few nodes does not reach all of it
_SLOW, _BROKEN = 0.5, 0.2
_EFA_LINE = "provider is efa"
_BROKEN_NCCL = ((2, 28, 3), (2, 28, 8))  # segfaults with in-process restart (NVRx 0.5 release notes)


def run_smoke(kubectl: Kubectl, run: Run) -> Iterator[Finding]:
    """Start the Job, wait for its end, judge its log and remove it."""
    objects = smoke_objects(run)
    name = objects[-1]["metadata"]["name"]
    kubectl.apply(yaml.safe_dump_all(objects))
    try:
        job = _wait(kubectl, name)
        log = _log(kubectl, name) if job is not None else ""
        if job is None or jobs.failure_of(job):
            yield _did_not_end(kubectl, name, job)
            return
        yield from judge(log, run)
    finally:
        jobs.delete_objects(kubectl, name)


def smoke_objects(run: Run) -> list[Manifest]:
    """Return recipe, Service and Job."""
    name = job_name(run).replace(run.recipe.job.name, "smoke", 1)
    job = trainer.training_job(run, name=name)
    nodes = run.recipe.job.nodes
    job["spec"] |= {"completions": nodes, "parallelism": nodes, "backoffLimitPerIndex": 0}
    pod = job["spec"]["template"]["spec"]
    pod["terminationGracePeriodSeconds"] = _GRACE_SECONDS
    container = pod["containers"][0]
    container["command"] = _command(run, name=name)
    container["env"] = [
        *(variable for variable in container["env"] if variable["name"] != "NCCL_DEBUG"),
        {"name": "NCCL_DEBUG", "value": "INFO"},
        {"name": "NCCL_DEBUG_SUBSYS", "value": "INIT,NET"},
    ]
    return [recipe_config_map(run, name=name), trainer.training_service(run, name=name), job]


def judge(log: str, run: Run) -> Iterator[Finding]:
    """Judge what rank 0 has printed."""
    result = _result(log)
    if result is None:
        yield fail("smoke", "the Job ended without a result", "read the log of its pods")
        return
    yield ok("mount", f"{SHARED_FILE_SYSTEM} can be written and read on every node")
    if run.recipe.job.nodes > 1:
        yield from _network_findings(log, result, run)
    yield from _version_findings(result)


def _network_findings(log: str, result: Mapping[str, Any], run: Run) -> Iterator[Finding]:
    if _EFA_LINE not in log:
        fix = "check the EFA plugin, the security group's self rules and the image's OFI plugin"
        yield fail("efa", "NCCL did not choose the efa provider of NET/OFI", fix)
    have = float(result["bus_gigabytes_per_second"])
    want = run.instance.bandwidth_gbps / 8
    message = f"all-reduce {have:.1f} GB/s, {have / want:.0%} of the {want:.0f} GB/s of {run.instance.name}"
    if have < _BROKEN * want:
        yield fail("bandwidth", message, "NCCL is not on EFA, or a node's interfaces are missing")
    elif have < _SLOW * want:
        yield warn("bandwidth", message, "check the placement group, and topology lines of NCCL_DEBUG=INFO")
    else:
        yield ok("bandwidth", message)


def _version_findings(result: Mapping[str, Any]) -> Iterator[Finding]:
    versions = ", ".join(f"{name} {result[name]}" for name in ("torch", "nccl", "nvrx", "glibc"))
    if result["nvrx"] not in KNOWN_VERSIONS:
        message = f"NVRx must be {' or '.join(KNOWN_VERSIONS)} ({versions})"
        yield fail("image", message, "build the image again")
    elif result["nccl"] and _BROKEN_NCCL[0] <= _numbers(result["nccl"]) <= _BROKEN_NCCL[1]:
        fix = "use NCCL 2.28.9 or newer"
        yield fail("image", f"this NCCL crashes with in-process restart ({versions})", fix)
    else:
        yield ok("image", versions)


def _command(run: Run, *, name: str) -> list[str]:
    return [
        *("python", "-m", "torch.distributed.run"),
        f"--nnodes={run.recipe.job.nodes}",
        f"--nproc-per-node={run.recipe.job.ranks_per_node}",
        f"--node-rank=$({environment.NODE_INDEX})",
        f"--master-addr={name}-0.{name}",
        f"--master-port={SMOKE_PORT}",
        *("-m", "training.smoke"),
        f"{SHARED_FILE_SYSTEM}/smoke",
        str(_SIZE_MIB),
    ]


def _wait(kubectl: Kubectl, name: str) -> dict[str, Any] | None:
    """Return the Job when it has ended, or None if it does not."""
    deadline = time.monotonic() + _WAIT_SECONDS
    while time.monotonic() < deadline:
        job = kubectl.get("job", name)
        if job is not None and jobs.is_finished(job):
            return job
        time.sleep(_POLL_SECONDS)
    return None


def _log(kubectl: Kubectl, name: str) -> str:
    first = f"{jobs.selector_of(name)},batch.kubernetes.io/job-completion-index=0"
    return kubectl.run("logs", f"--selector={first}", f"--container={trainer.CONTAINER}", "--tail=-1")


def _did_not_end(kubectl: Kubectl, name: str, job: dict[str, Any] | None) -> Finding:
    phases = sorted(
        f"{pod['metadata']['name']} {pod['status']['phase']}"
        for pod in kubectl.list_objects("pod", selector=jobs.selector_of(name))
    )
    reason = jobs.failure_of(job) if job else f"not done in {_WAIT_SECONDS} s"
    fix = "pending: capacity or plugins; creating: the mount; failed: read the pod's log"
    return fail("smoke", f"{reason}; pods: {', '.join(phases) or 'none'}", fix)


def _result(log: str) -> dict[str, Any] | None:
    for line in reversed(log.splitlines()):
        if MARK in line:
            found: dict[str, Any] = json.loads(line[line.index("{") :])[MARK]
            return found
    return None


def _numbers(version: str) -> tuple[int, ...]:
    return tuple(int(part) for part in version.split(".")[:3])
