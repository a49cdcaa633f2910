"""Exceptions of Holdfast.

HoldfastError
├── ConfigError      a setting is wrong; exit code 64, never retried
├── CheckpointError  saved state that should be there cannot be read or written
├── RunError         the run cannot start or go on (directory in use, too few ranks)
└── SameStepError    a step fails again and again (training/failures.py); exit code 65, never retried

Exit codes follow `sysexits.h`, so a Kubernetes podFailurePolicy can tell them apart.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

EXIT_DONE = 0
EXIT_RETRY = 1
EXIT_CONFIG = 64
EXIT_SAME_STEP = 65
EXIT_STOPPED = 143


@dataclass(frozen=True, kw_only=True, slots=True)
class Problem:
    """One wrong field: where it is, what it holds, the rule it breaks, how to mend it."""

    path: str
    value: Any = None
    rule: str
    fix: str

    def __str__(self) -> str:
        shown = "" if self.value is None else f"={self.value!r}"
        return f"{self.path}{shown}: {self.rule}; {self.fix}"


class HoldfastError(Exception):
    """Base of all errors that are shown to a person without a traceback."""

    exit_code = EXIT_RETRY


class ConfigError(HoldfastError):
    """Settings that break a rule. Retrying cannot help."""

    exit_code = EXIT_CONFIG

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        super().__init__("\n".join(str(problem) for problem in self.problems))

    def __reduce__(self) -> tuple[type[ConfigError], tuple[tuple[Problem, ...]]]:
        return type(self), (self.problems,)

    @classmethod
    def of(cls, path: str, value: Any, rule: str, fix: str) -> ConfigError:
        return cls([Problem(path=path, value=value, rule=rule, fix=fix)])


class CheckpointError(HoldfastError):
    """Saved state that should be there is missing, torn or unreadable."""


class RunError(HoldfastError):
    """The run cannot start or go on for a reason outside its settings."""
