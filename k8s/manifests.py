"""Recipe and stack outputs to Kubernetes objects: pure functions, plain dictionaries."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Literal

import yaml

from k8s import control, trainer
from k8s.pod import Manifest, recipe_config_map
from k8s.prerequisites import prerequisites
from k8s.run import Run
from k8s.single_pod_jobs import export_job, preparation_job

JobKind = Literal["train", "prepare", "export"]
JOB_KINDS: tuple[JobKind, ...] = ("train", "prepare", "export")

_HASH_CHARACTERS = 8


def job_objects(run: Run, kind: JobKind = "train") -> list[Manifest]:
    """Return a Job and what belongs to it, in the order to create them: the Job itself comes last."""
    return _BUILDERS[kind](run, job_name(run, kind))


def job_name(run: Run, kind: JobKind = "train") -> str:
    """Return the Job's name, which changes with anything in its objects.

    A Job's template is immutable, so a changed recipe or image has to be another Job. The longest pod
    name made from it, JOB-control-xxxxx, keeps within the 63 characters of a DNS label.
    """
    objects = _BUILDERS[kind](run, "name")
    digest = hashlib.sha256(json.dumps(objects, sort_keys=True).encode()).hexdigest()
    suffix = digest[:_HASH_CHARACTERS]
    return f"{run.recipe.job.name}-{suffix}" if kind == "train" else f"{run.recipe.job.name}-{kind}-{suffix}"


def render(run: Run, kind: JobKind = "train", *, with_prerequisites: bool = False) -> str:
    """Return a Job and what belongs to it, byte for byte the same for the same input."""
    return as_yaml([*(prerequisites(run) if with_prerequisites else ()), *job_objects(run, kind)])


def as_yaml(objects: Sequence[Manifest]) -> str:
    """Return YAML documents that look as people write them."""
    return yaml.dump_all(objects, Dumper=_Dumper, sort_keys=False, width=1000, explicit_start=True)


def _training_objects(run: Run, name: str) -> list[Manifest]:
    return [
        recipe_config_map(run, name=name),
        control.publisher_role(run, name=name),
        control.publisher_role_binding(run, name=name),
        control.control_service(run, name=name),
        control.control_job(run, name=name),
        trainer.training_service(run, name=name),
        trainer.disruption_budget(run, name=name),
        trainer.training_job(run, name=name),
    ]


def _preparation_objects(run: Run, name: str) -> list[Manifest]:
    return [recipe_config_map(run, name=name), preparation_job(run, name=name)]


def _export_objects(run: Run, name: str) -> list[Manifest]:
    return [recipe_config_map(run, name=name), export_job(run, name=name)]


_BUILDERS: dict[JobKind, Callable[[Run, str], list[Manifest]]] = {
    "train": _training_objects,
    "prepare": _preparation_objects,
    "export": _export_objects,
}


class _Dumper(yaml.SafeDumper):
    """Writes recipes as they look, and no anchors."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _text(dumper: yaml.SafeDumper, value: str) -> yaml.ScalarNode:
    style = "|" if "\n" in value else None
    return dumper.represent_scalar("tag:yaml.org,2002:str", value, style=style)


_Dumper.add_representer(str, _text)
