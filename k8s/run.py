"""One run on one cluster: what every manifest is made from."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path, PurePosixPath

from eks_training.instance_types import INSTANCE_TYPES, InstanceType
from k8s import sizing
from k8s.outputs import StackOutputs
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
        return self.recipe.job.nodes + self.recipe.job.spares

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
    problems = list(_problems(recipe, outputs, instance))
    if problems:
        raise ConfigError(problems)
    return Run(
        recipe=recipe,
        recipe_text=recipe_text,
        outputs=outputs,
        instance=instance,
        resources=sizing.pod_resources(
            recipe, instance, file_system_capacity_gib=outputs.file_system_capacity_gib
        ),
    )


def _problems(recipe: JobConfig, outputs: StackOutputs, instance: InstanceType) -> Iterator[Problem]:
    job = recipe.job
    if job.ranks_per_node != instance.gpus:
        yield Problem(
            path="job.ranks_per_node",
            value=job.ranks_per_node,
            rule=f"must be the {instance.gpus} GPUs of {instance.name}: a pod takes a whole node",
            fix=f"set it to {instance.gpus}",
        )
    if job.nodes + job.spares > outputs.nodes + outputs.spares:
        yield Problem(
            path="job.nodes",
            value=job.nodes,
            rule=f"with {job.spares} spares, must be within the cluster's {outputs.nodes + outputs.spares}"
            f" {instance.name} nodes",
            fix="lower it, or deploy more nodes",
        )
    if recipe.training.device == "cpu":
        fix = 'set training.device = "cuda"'
        yield Problem(path="training.device", value="cpu", rule="these are GPU nodes", fix=fix)
    if not recipe.data.path.startswith(f"{SHARED_FILE_SYSTEM}/"):
        rule = f"must be on the shared file system, {SHARED_FILE_SYSTEM}/"
        fix = f"use {SHARED_FILE_SYSTEM}/data/NAME"
        yield Problem(path="data.path", value=recipe.data.path, rule=rule, fix=fix)
    local = recipe.checkpoint.local.directory
    if local and not PurePosixPath(local).is_relative_to(LOCAL_DISK):
        rule = f"must be within {LOCAL_DISK}, where pods have their node's own disk"
        yield Problem(path="checkpoint.local.directory", value=local, rule=rule, fix=f"use {LOCAL_DISK}")
    if recipe.kubernetes.restart_in_place and outputs.kubernetes_minor < RESTART_RULES_MINOR:
        rule = f"needs Kubernetes 1.{RESTART_RULES_MINOR}; the cluster has {outputs.kubernetes_version}"
        yield Problem(path="kubernetes.restart_in_place", value=True, rule=rule, fix="leave it out")
