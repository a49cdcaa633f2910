"""One run on one cluster: what every manifest is made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from datetime import datetime, timedelta
from pathlib import Path, PurePosixPath

from eks_training.instance_types import INSTANCE_TYPES, InstanceType
from eks_training.node_shutdown import BLOCK_DRAIN_SECONDS
from k8s import sizing
from k8s.outputs import StackOutputs, minor_version
from training import schema
from training.config import JobConfig, load_recipe
from training.errors import ConfigError, Problem

SHARED_FILE_SYSTEM = "/fsx"
LOCAL_DISK = "/local"
RESTART_RULES_MINOR = 35  # KEP-5307 is on by default from 1.35


@dataclass(frozen=True, kw_only=True, slots=True)
class Run:
    """A recipe that fits a cluster."""

    recipe: JobConfig
    recipe_text: str
    outputs: StackOutputs
    instance: InstanceType
    resources: sizing.PodResources

    @property
    def directory(self) -> str:
        """Directory of checkpoints and events; the same for every Job of this run."""
        return f"{SHARED_FILE_SYSTEM}/runs/{self.recipe.job.name}"

    @property
    def pods(self) -> int:
        return self.recipe.job.launchers

    @property
    def stop_at(self) -> datetime | None:
        """When the run has to stop, so that its last save ends before the capacity does."""
        if not self.outputs.capacity_end:
            return None
        before = timedelta(seconds=BLOCK_DRAIN_SECONDS + self.resources.grace_seconds)
        return datetime.fromisoformat(self.outputs.capacity_end) - before

    def image(self, of_stack: str) -> str:
        """Return an image of the stack, from the private registry if the recipe names one."""
        registry = self.recipe.kubernetes.image_registry.rstrip("/")
        return f"{registry}/{of_stack.partition('/')[2]}" if registry else of_stack


def load_run(recipe_path: Path, outputs: StackOutputs) -> Run:
    """Read a recipe and check it against the cluster.

    Raises:
        ConfigError: The recipe is wrong, or cannot run on this cluster.
    """
    return make_run(load_recipe(recipe_path), recipe_path.read_text(), outputs)


def make_run(recipe: JobConfig, recipe_text: str, outputs: StackOutputs) -> Run:
    """Check a recipe against the cluster and size its pods.

    Raises:
        ConfigError: It cannot run on this cluster.
    """
    instance = INSTANCE_TYPES.get(outputs.instance_type)
    if instance is None:
        fix = schema.suggest(outputs.instance_type, list(INSTANCE_TYPES))
        raise ConfigError.of("outputs.InstanceType", outputs.instance_type, "is no type we know", fix)
    resources = fit(
        recipe,
        instance,
        nodes=outputs.nodes + outputs.spares,
        kubernetes_version=outputs.kubernetes_version,
        file_system_capacity_gib=outputs.file_system_capacity_gib,
    )
    return Run(
        recipe=recipe, recipe_text=recipe_text, outputs=outputs, instance=instance, resources=resources
    )


def fit(
    recipe: JobConfig,
    instance: InstanceType,
    *,
    nodes: int,
    kubernetes_version: str,
    file_system_capacity_gib: int,
) -> sizing.PodResources:
    """Size the pods of a recipe for a cluster.

    Args:
        recipe: The recipe.
        instance: Type of the GPU nodes.
        nodes: Number of GPU nodes, spares included.
        kubernetes_version: Such as 1.36.
        file_system_capacity_gib: Size of the shared file system.

    Raises:
        ConfigError: It cannot run there.
    """
    problems = [
        *_job_problems(recipe, instance, nodes=nodes),
        *_place_problems(recipe),
        *_version_problems(recipe, kubernetes_version),
    ]
    if problems:
        raise ConfigError(problems)
    return sizing.pod_resources(recipe, instance, file_system_capacity_gib=file_system_capacity_gib)


def _job_problems(recipe: JobConfig, instance: InstanceType, *, nodes: int) -> Iterator[Problem]:
    job = recipe.job
    if job.ranks_per_node != instance.gpus:
        yield Problem(
            path="job.ranks_per_node",
            value=job.ranks_per_node,
            rule=f"must be the {instance.gpus} GPUs of {instance.name}: a pod takes a whole node",
            fix=f"set it to {instance.gpus}",
        )
    if job.launchers > nodes:
        rule = f"with {job.spares} spares, must be within the cluster's {nodes} {instance.name} nodes"
        yield Problem(path="job.nodes", value=job.nodes, rule=rule, fix="lower it, or deploy more nodes")
    if recipe.training.device == "cpu":
        fix = 'set training.device = "cuda"'
        yield Problem(path="training.device", value="cpu", rule="these are GPU nodes", fix=fix)


def _place_problems(recipe: JobConfig) -> Iterator[Problem]:
    data, local = recipe.data.path, recipe.checkpoint.local.directory
    if not data.startswith(f"{SHARED_FILE_SYSTEM}/"):
        rule = f"must be on the shared file system, {SHARED_FILE_SYSTEM}/"
        yield Problem(path="data.path", value=data, rule=rule, fix=f"use {SHARED_FILE_SYSTEM}/data/NAME")
    if local and not PurePosixPath(local).is_relative_to(LOCAL_DISK):
        rule = f"must be within {LOCAL_DISK}, where pods have their node's own disk"
        yield Problem(path="checkpoint.local.directory", value=local, rule=rule, fix=f"use {LOCAL_DISK}")


def _version_problems(recipe: JobConfig, kubernetes_version: str) -> Iterator[Problem]:
    if recipe.kubernetes.restart_in_place and minor_version(kubernetes_version) < RESTART_RULES_MINOR:
        rule = f"needs Kubernetes 1.{RESTART_RULES_MINOR}; the cluster has {kubernetes_version}"
        yield Problem(path="kubernetes.restart_in_place", value=True, rule=rule, fix="leave it out")
