"""What a check has found, and how findings are shown."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Literal

from k8s.text_table import table

Level = Literal["OK", "WARN", "FAIL"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Finding:
    """One fact about account or cluster."""

    name: str
    level: Level
    message: str
    fix: str = ""
    """What to do; empty where nothing is to be done."""


Check = Callable[[], Iterable[Finding]]


def ok(name: str, message: str) -> Finding:
    return Finding(name=name, level="OK", message=message)


def warn(name: str, message: str, fix: str) -> Finding:
    return Finding(name=name, level="WARN", message=message, fix=fix)


def fail(name: str, message: str, fix: str) -> Finding:
    return Finding(name=name, level="FAIL", message=message, fix=fix)


def at_least(name: str, what: str, *, have: float, need: float, fix: str) -> Finding:
    """Compare a quantity with what is needed of it."""
    message = f"{what}: {have:g}, needed {need:g}"
    return ok(name, message) if have >= need else fail(name, message, fix)


def exit_code(findings: Iterable[Finding]) -> int:
    """Return 0 if all is well, 1 with warnings, 2 with failures."""
    levels = {finding.level for finding in findings}
    return 2 if "FAIL" in levels else 1 if "WARN" in levels else 0


def as_json(findings: Iterable[Finding]) -> str:
    return json.dumps([dataclasses.asdict(finding) for finding in findings], indent=2)


def as_table(findings: list[Finding]) -> str:
    rows = [(finding.level, finding.name, finding.message) for finding in findings]
    lines = list(table(("", "CHECK", "FOUND"), rows))
    return "\n".join(_with_fixes(lines, findings))


def _with_fixes(lines: list[str], findings: list[Finding]) -> Iterator[str]:
    yield lines[0]
    for line, finding in zip(lines[1:], findings, strict=True):
        yield line
        if finding.fix:
            yield f"      fix: {finding.fix}"
