"""Turn a TOML or JSON mapping into frozen dataclasses, with one message per wrong field.

Both halves of Holdfast read their settings through this module: `training/config.py` (job recipes)
and `stacks/config.py` (cluster context). Rules stand next to the field, as `Annotated` markers:

    steps: Annotated[int, Range(minimum=1)]
    seed: Annotated[int, FIXED] = 0

Rules across fields go into a method `problems(self) -> Iterator[Problem]` with paths relative to the
dataclass. Every rule is checked before an error is raised, so a person sees all of them at once.
"""

from __future__ import annotations

import ast
import dataclasses
import difflib
import inspect
import itertools
import re
import textwrap
import types
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Annotated, Any, Literal, TypeVar, Union, get_args, get_origin, get_type_hints

from training.errors import ConfigError, Problem

T = TypeVar("T")


@dataclass(frozen=True, kw_only=True, slots=True)
class Range:
    """Inclusive bounds of a number."""

    minimum: float | None = None
    maximum: float | None = None

    def rule(self) -> str:
        if self.maximum is None:
            return f"must be at least {self.minimum:g}"
        if self.minimum is None:
            return f"must be at most {self.maximum:g}"
        return f"must be from {self.minimum:g} to {self.maximum:g}"

    def allows(self, value: float) -> bool:
        above = self.minimum is None or value >= self.minimum
        return above and (self.maximum is None or value <= self.maximum)


@dataclass(frozen=True, kw_only=True, slots=True)
class Pattern:
    """A regular expression that a string must match in full."""

    regex: str
    description: str


@dataclass(frozen=True, slots=True)
class Fixed:
    """Marks a field that may not change when a run resumes."""


FIXED = Fixed()

Positive = Annotated[int, Range(minimum=1)]
Count = Annotated[int, Range(minimum=0)]
Seconds = Annotated[float, Range(minimum=0.1)]


def load(cls: type[T], mapping: Mapping[str, Any], *, path: str = "") -> T:
    """Build `cls` from `mapping`, or raise one `ConfigError` that lists every wrong field."""
    problems: list[Problem] = []
    value = _build(cls, mapping, path, problems)
    if problems:
        raise ConfigError(problems)
    return value  # type: ignore[no-any-return]


def fixed_values(config: Any, *, path: str = "") -> dict[str, Any]:
    """Return {field path: value} of every field marked `FIXED`, nested dataclasses included."""
    found: dict[str, Any] = {}
    hints = get_type_hints(type(config), include_extras=True)
    for field in dataclasses.fields(config):
        value, where = getattr(config, field.name), _join(path, field.name)
        if dataclasses.is_dataclass(value):
            found |= fixed_values(value, path=where)
        elif FIXED in _markers(hints[field.name]):
            found[where] = value
    return found


def json_schema(cls: type[Any]) -> dict[str, Any]:
    """Return the JSON schema (draft 2020-12) of a settings dataclass, descriptions included."""
    hints, docs = get_type_hints(cls, include_extras=True), field_docs(cls)
    properties: dict[str, Any] = {}
    for field in dataclasses.fields(cls):
        entry = _type_schema(hints[field.name])
        if field.name in docs:
            entry["description"] = docs[field.name]
        if isinstance(field.default, str | int | float | bool):
            entry["default"] = field.default
        properties[field.name] = entry
    required = [field.name for field in dataclasses.fields(cls) if _is_required(field)]
    return {
        "type": "object",
        "properties": properties,
        "required": required,
        "additionalProperties": False,
    }


def field_docs(cls: type[Any]) -> dict[str, str]:
    """Return the docstring literal that follows each field of `cls`."""
    body = ast.parse(textwrap.dedent(inspect.getsource(cls))).body[0]
    assert isinstance(body, ast.ClassDef)
    docs: dict[str, str] = {}
    for statement, following in itertools.pairwise(body.body):
        match statement, following:
            case ast.AnnAssign(target=ast.Name(id=name)), ast.Expr(value=ast.Constant(value=str(text))):
                docs[name] = inspect.cleandoc(text)
    return docs


def suggest(name: str, known: list[str]) -> str:
    """Return what to do about an unknown key."""
    close = difflib.get_close_matches(name, known, n=1)
    if close:
        return f"did you mean {close[0]!r}?"
    return f"use one of {', '.join(sorted(known))}"


def _build(cls: type[Any], mapping: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(mapping, Mapping):
        problems.append(_wrong_type(path, mapping, "a table"))
        return None
    fields = {field.name: field for field in dataclasses.fields(cls)}
    before = len(problems)
    for key in mapping:
        if key not in fields:
            problems.append(
                Problem(path=_join(path, key), rule="unknown key", fix=suggest(key, list(fields)))
            )
    hints = get_type_hints(cls, include_extras=True)
    values = {
        name: _convert(hints[name], mapping[name], _join(path, name), problems)
        for name in fields
        if name in mapping
    }
    for name, field in fields.items():
        if name not in mapping and _is_required(field):
            problems.append(Problem(path=_join(path, name), rule="is required", fix="set it"))
    if len(problems) > before:
        return None
    config = cls(**values)
    problems.extend(_own_problems(config, path))
    return config


def _own_problems(config: Any, path: str) -> Iterator[Problem]:
    for problem in getattr(config, "problems", lambda: ())():
        yield dataclasses.replace(problem, path=_join(path, problem.path))


def _convert(hint: Any, value: Any, path: str, problems: list[Problem]) -> Any:
    base, before = _base(hint), len(problems)
    converted = _convert_base(base, value, path, problems)
    if len(problems) == before and converted is not None:
        problems.extend(_broken_markers(hint, converted, path))
    return converted


def _convert_base(base: Any, value: Any, path: str, problems: list[Problem]) -> Any:
    if dataclasses.is_dataclass(base):
        return _build(base, value, path, problems)  # type: ignore[arg-type]
    origin = get_origin(base)
    if origin is Literal:
        return _convert_choice(get_args(base), value, path, problems)
    if origin is tuple:
        return _convert_list(get_args(base)[0], value, path, problems)
    if origin in (Union, types.UnionType):
        return _convert_union(get_args(base), value, path, problems)
    return _convert_scalar(base, value, path, problems)


def _convert_choice(choices: tuple[Any, ...], value: Any, path: str, problems: list[Problem]) -> Any:
    # `True == 1` in Python: a boolean is never one of the integer choices
    if value in choices and type(value) in {type(choice) for choice in choices}:
        return value
    names = [str(choice) for choice in choices]
    rule = f"must be one of {', '.join(names)}"
    problems.append(Problem(path=path, value=value, rule=rule, fix=suggest(str(value), names)))
    return None


def _convert_list(item: Any, value: Any, path: str, problems: list[Problem]) -> Any:
    if not isinstance(value, list | tuple):
        problems.append(_wrong_type(path, value, "a list"))
        return None
    return tuple(_convert(item, v, f"{path}[{i}]", problems) for i, v in enumerate(value))


def _convert_union(options: tuple[Any, ...], value: Any, path: str, problems: list[Problem]) -> Any:
    if value is None and type(None) in options:
        return None
    tried: list[list[Problem]] = []
    for option in options:
        attempt: list[Problem] = []
        converted = _convert(option, value, path, attempt)
        if not attempt:
            return converted
        if option is not type(None):
            tried.append(attempt)
    problems.extend(tried[0] if len(tried) == 1 else [_no_option_fits(path, value, tried)])
    return None


def _no_option_fits(path: str, value: Any, tried: list[list[Problem]]) -> Problem:
    first, *others = [attempt[0] for attempt in tried]
    rules = [first.rule, *(other.rule.removeprefix("must be ") for other in others)]
    fix = first.fix if first.fix.startswith("did you mean") else "change it"
    return Problem(path=path, value=value, rule=", or ".join(rules), fix=fix)


_SCALARS = {str: "text", bool: "true or false", int: "a whole number", float: "a number"}


def _convert_scalar(base: Any, value: Any, path: str, problems: list[Problem]) -> Any:
    if base is Any or get_origin(base) is dict or base is dict:
        if base is not Any and not isinstance(value, Mapping):
            problems.append(_wrong_type(path, value, "a table"))
        return value
    if base is float and isinstance(value, int) and not isinstance(value, bool):
        return float(value)
    if not isinstance(value, base) or (base is int and isinstance(value, bool)):
        problems.append(_wrong_type(path, value, _SCALARS.get(base, str(base))))
        return None
    return value


def _broken_markers(hint: Any, value: Any, path: str) -> Iterator[Problem]:
    for marker in _markers(hint):
        if isinstance(marker, Range) and not marker.allows(value):
            yield Problem(path=path, value=value, rule=marker.rule(), fix="change it")
        if isinstance(marker, Pattern) and not re.fullmatch(marker.regex, value):
            yield Problem(path=path, value=value, rule=f"must be {marker.description}", fix="change it")


def _type_schema(hint: Any) -> dict[str, Any]:
    base = _base(hint)
    schema = _base_schema(base)
    for marker in _markers(hint):
        if isinstance(marker, Range):
            bounds = {"minimum": marker.minimum, "maximum": marker.maximum}
            schema |= {name: bound for name, bound in bounds.items() if bound is not None}
        if isinstance(marker, Pattern):
            schema["pattern"] = f"^(?:{marker.regex})$"
    return schema


def _base_schema(base: Any) -> dict[str, Any]:
    if dataclasses.is_dataclass(base):
        return json_schema(base)  # type: ignore[arg-type]
    origin = get_origin(base)
    if origin is Literal:
        return {"enum": list(get_args(base))}
    if origin is tuple:
        return {"type": "array", "items": _type_schema(get_args(base)[0])}
    if origin in (Union, types.UnionType):
        return {"anyOf": [_type_schema(option) for option in get_args(base)]}
    names = {str: "string", bool: "boolean", int: "integer", float: "number", type(None): "null"}
    return {"type": names[base]} if base in names else {"type": "object"}


def _wrong_type(path: str, value: Any, expected: str) -> Problem:
    rule = f"must be {expected}, not {type(value).__name__}"
    return Problem(path=path, value=value, rule=rule, fix="change it")


def _base(hint: Any) -> Any:
    return get_args(hint)[0] if get_origin(hint) is Annotated else hint


def _markers(hint: Any) -> tuple[Any, ...]:
    return get_args(hint)[1:] if get_origin(hint) is Annotated else ()


def _is_required(field: dataclasses.Field[Any]) -> bool:
    return field.default is dataclasses.MISSING and field.default_factory is dataclasses.MISSING


def _join(path: str, name: str) -> str:
    return f"{path}.{name}" if path else name
