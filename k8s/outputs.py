"""The stacks' outputs: what `cdk deploy --outputs-file outputs.json` wrote about the cluster."""

from __future__ import annotations

import dataclasses
import json
import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from training.errors import ConfigError, Problem

REDEPLOY = "deploy the stacks again with --outputs-file"
_OPTIONAL = {"capacity_end"}
_FORMATS = {
    "kubernetes_version": re.compile(r"1\.\d+"),
    "capacity_end": re.compile(r"(\d{4}-\d\d-\d\dT\d\d:\d\d:\d\dZ)?"),
}
_EXAMPLES = {"kubernetes_version": "1.36", "capacity_end": "2026-12-09T11:30:00Z"}


@dataclass(frozen=True, kw_only=True, slots=True)
class StackOutputs:
    """One cluster. `ClusterName` in the file is `cluster_name` here, and so on."""

    cluster_name: str
    region: str
    availability_zone: str
    """Zone that holds the GPU nodes and the file system."""
    instance_type: str
    nodes: int
    spares: int
    """Spare nodes, on top of `nodes`."""
    namespace: str
    training_service_account: str
    control_service_account: str
    file_system_id: str
    file_system_dns_name: str
    file_system_mount_name: str
    file_system_capacity_gib: int
    persistent_volume_claim: str
    trainer_image: str
    control_image: str
    capacity_mode: str
    capacity_end: str = ""
    """When a capacity block ends, ISO 8601; empty for other modes."""
    kubernetes_version: str


def load_outputs(path: Path) -> StackOutputs:
    """Read an outputs file and merge its stacks.

    Raises:
        ConfigError: The file is missing, is no such file, or lacks a value.
    """
    try:
        stacks = json.loads(path.read_text())
    except OSError as error:
        fix = "give the file that `cdk deploy --outputs-file` wrote, or k8s/sample_outputs.json"
        raise ConfigError.of("--outputs", str(path), f"cannot be read ({error.strerror})", fix) from error
    except ValueError as error:
        raise ConfigError.of("--outputs", str(path), f"is not JSON: {error}", REDEPLOY) from error
    if not isinstance(stacks, Mapping) or not all(isinstance(s, Mapping) for s in stacks.values()):
        raise ConfigError.of("--outputs", str(path), "must be {stack: {key: value}}", REDEPLOY)
    return parse_outputs(stacks)


def parse_outputs(stacks: Mapping[str, Mapping[str, Any]]) -> StackOutputs:
    """Merge the outputs of all stacks; keys that nobody asks for are left aside.

    Raises:
        ConfigError: A value is missing, contradicts another stack's, or breaks a rule.
    """
    merged: dict[str, str] = {}
    problems: list[Problem] = []
    for stack, values in stacks.items():
        for key, value in values.items():
            if key in _KEYS and merged.setdefault(key, str(value)) != str(value):
                rule = f"differs from the {merged[key]!r} of another stack"
                problems.append(Problem(path=f"{stack}.{key}", value=value, rule=rule, fix=REDEPLOY))
    fields: dict[str, Any] = {}
    for key, field in _KEYS.items():
        problems.extend(_read_field(key, field, merged, fields))
    if problems:
        raise ConfigError(problems)
    return StackOutputs(**fields)


def _read_field(
    key: str, field: dataclasses.Field[Any], merged: Mapping[str, str], fields: dict[str, Any]
) -> Iterator[Problem]:
    value = merged.get(key, "")
    if not value and field.name not in _OPTIONAL:
        yield Problem(path=f"outputs.{key}", rule="is missing", fix=REDEPLOY)
    elif field.type == "int":
        if not value.isdecimal():
            yield Problem(path=f"outputs.{key}", value=value, rule="must be a whole number", fix=REDEPLOY)
        else:
            fields[field.name] = int(value)
    elif field.name in _FORMATS and not _FORMATS[field.name].fullmatch(value):
        rule = f"must be like {_EXAMPLES[field.name]}"
        yield Problem(path=f"outputs.{key}", value=value, rule=rule, fix=REDEPLOY)
    else:
        fields[field.name] = value


def minor_version(kubernetes_version: str) -> int:
    return int(kubernetes_version.split(".")[1])


_KEYS = {
    "".join(word.title() for word in field.name.split("_")): field
    for field in dataclasses.fields(StackOutputs)
}
