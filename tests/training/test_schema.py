from __future__ import annotations

import json
import pickle
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Annotated, Any, Literal

import pytest

from training import schema
from training.errors import ConfigError, Problem
from training.schema import FIXED, Pattern, Range


@dataclass(frozen=True, kw_only=True, slots=True)
class Disk:
    """A disk."""

    size_gib: Annotated[int, Range(minimum=1, maximum=100)]
    """Size of the disk."""
    kind: Annotated[Literal["ssd", "hdd"], FIXED] = "ssd"


@dataclass(frozen=True, kw_only=True, slots=True)
class Machine:
    """A machine."""

    name: Annotated[str, Pattern(regex="[a-z]+", description="lower-case letters")]
    disk: Disk
    ratio: float = 0.5
    tags: tuple[str, ...] = ()
    zone: str | None = None
    extra: dict[str, Any] = field(default_factory=dict)

    def problems(self) -> Iterator[Problem]:
        if self.name == "bad":
            yield Problem(path="name", value=self.name, rule="is bad", fix="be good")


def load(**fields: Any) -> Machine:
    return schema.load(Machine, {"name": "a", "disk": {"size_gib": 5}, **fields})


def test_builds_nested_dataclasses() -> None:
    machine = load(ratio=1, tags=["x", "y"], zone="b", extra={"k": 1})
    assert machine == Machine(
        name="a", disk=Disk(size_gib=5), ratio=1.0, tags=("x", "y"), zone="b", extra={"k": 1}
    )
    assert isinstance(machine.ratio, float)


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"nane": "a"}, "nane: unknown key; did you mean 'name'?"),
        ({"zzzz": 1}, "zzzz: unknown key; use one of disk, extra, name"),
        ({"disk": {"size_gb": 5}}, "disk.size_gb: unknown key; did you mean 'size_gib'?"),
        ({"disk": {}}, "disk.size_gib: is required; set it"),
        ({"disk": 5}, "disk=5: must be a table, not int"),
        ({"disk": {"size_gib": 0}}, "disk.size_gib=0: must be from 1 to 100"),
        ({"disk": {"size_gib": True}}, "disk.size_gib=True: must be a whole number, not bool"),
        ({"disk": {"size_gib": "5"}}, "disk.size_gib='5': must be a whole number, not str"),
        ({"disk": {"size_gib": 1.5}}, "disk.size_gib=1.5: must be a whole number, not float"),
        ({"disk": {"size_gib": 5, "kind": "sdd"}}, "must be one of ssd, hdd; did you mean 'ssd'?"),
        ({"name": "A"}, "name='A': must be lower-case letters"),
        ({"name": "bad"}, "name='bad': is bad; be good"),
        ({"tags": "x"}, "tags='x': must be a list, not str"),
        ({"tags": ["x", 1]}, "tags[1]=1: must be text, not int"),
        ({"zone": 3}, "zone=3: must be text, not int"),
        ({"extra": []}, "extra=[]: must be a table"),
    ],
)
def test_names_field_value_rule_and_fix(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        load(**fields)
    assert message in str(caught.value)


def test_reports_every_problem_at_once() -> None:
    with pytest.raises(ConfigError) as caught:
        schema.load(Machine, {"disk": {"size_gib": 0, "kind": "x"}, "ratio": "y"})
    assert len(caught.value.problems) == 4
    assert pickle.loads(pickle.dumps(caught.value)).problems == caught.value.problems


def test_fixed_values() -> None:
    assert schema.fixed_values(load()) == {"disk.kind": "ssd"}


def test_json_schema_has_types_bounds_and_descriptions() -> None:
    made = schema.json_schema(Machine)
    disk = made["properties"]["disk"]
    assert made["required"] == ["name", "disk"]
    assert made["additionalProperties"] is False
    assert disk["properties"]["size_gib"] == {
        "type": "integer",
        "minimum": 1,
        "maximum": 100,
        "description": "Size of the disk.",
    }
    assert disk["properties"]["kind"] == {"enum": ["ssd", "hdd"], "default": "ssd"}
    json.dumps(made)


@dataclass(frozen=True, kw_only=True, slots=True)
class Interval:
    every: Literal["auto"] | Annotated[int, Range(minimum=0)] = "auto"


@pytest.mark.parametrize(
    ("value", "message"),
    [
        (-1, "every=-1: must be one of auto, or at least 0; change it"),
        (1.5, "every=1.5: must be one of auto, or a whole number, not float; change it"),
        ("aut", "every='aut': must be one of auto, or a whole number, not str; did you mean 'auto'?"),
    ],
)
def test_a_value_that_fits_none_of_several_types_is_told_all_of_them(value: Any, message: str) -> None:
    with pytest.raises(ConfigError) as caught:
        schema.load(Interval, {"every": value})
    assert str(caught.value) == message
