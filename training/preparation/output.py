"""The output directory of prepare: one writer at a time, one request a directory.

`prepare.json` holds what was asked for, `report.json` what came of it and that it is complete.
"""

from __future__ import annotations

import fcntl
import json
import shutil
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from training.errors import ConfigError, Problem, RunError
from training.files import write_text
from training.preparation.parts import SPLITS
from training.shards import INDEX_FILE, ShardIndex, TokenStore

_REQUEST_FILE = "prepare.json"
_REPORT_FILE = "report.json"
_LOCK_FILE = ".lock"


class OutputDirectory:
    """Paths and states of an output directory."""

    def __init__(self, path: Path) -> None:
        self.path = path
        self.work = path / ".work"
        self.parts = self.work / "parts"
        self.download = self.work / "source"
        self.tokenizer = path / "tokenizer"

    @contextmanager
    def locked(self) -> Iterator[None]:
        """Keep other processes out.

        Raises:
            RunError: Another one is inside.
        """
        self.path.mkdir(parents=True, exist_ok=True)
        with (self.path / _LOCK_FILE).open("w") as file:
            try:
                fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
            except BlockingIOError as error:
                fix = "wait for it, or use another --output"
                raise RunError(f"{self.path}: another prepare is writing here; {fix}") from error
            yield

    def claim(self, request: dict[str, Any], *, force: bool) -> None:
        """Make the directory belong to `request`.

        Raises:
            ConfigError: It belongs to another request, or to somebody else.
        """
        file = self.path / _REQUEST_FILE
        if not file.is_file():
            if any(entry.name != _LOCK_FILE for entry in self.path.iterdir()):
                rule = "holds files that prepare did not make"
                raise ConfigError.of("--output", str(self.path), rule, "give an empty directory")
            return write_text(file, json.dumps(request, indent=1) + "\n")
        previous = json.loads(file.read_bytes())
        if previous == request:
            return None
        if not force and self._holds_results():
            raise ConfigError(list(_differences(self.path, previous, request)))
        self._clear()
        return write_text(file, json.dumps(request, indent=1) + "\n")

    def read_report(self) -> dict[str, Any] | None:
        """Return the report of finished shards, whose sizes are checked; None if they are not finished."""
        file = self.path / _REPORT_FILE
        if not file.is_file():
            return None
        for split in SPLITS:
            TokenStore(self.path / split)
        report: dict[str, Any] = json.loads(file.read_bytes())
        return report

    def finish(self, indexes: dict[str, ShardIndex], report: dict[str, Any]) -> None:
        """Publish the indexes and then the report; drop what was needed on the way."""
        for split, index in indexes.items():
            write_text(self.path / split / INDEX_FILE, index.to_json())
        write_text(self.path / _REPORT_FILE, json.dumps(report, indent=1) + "\n")
        shutil.rmtree(self.work)

    def _holds_results(self) -> bool:
        return (self.path / _REPORT_FILE).is_file() or any(self.parts.glob("*.json"))

    def _clear(self) -> None:
        # The request goes last: as long as it is there, the rest is known to be ours.
        (self.path / _REPORT_FILE).unlink(missing_ok=True)
        for directory in (*(self.path / split for split in SPLITS), self.tokenizer, self.work):
            shutil.rmtree(directory, ignore_errors=True)
        (self.path / _REQUEST_FILE).unlink()


def _differences(output: Path, previous: dict[str, Any], request: dict[str, Any]) -> Iterator[Problem]:
    fix = "use another --output, or --force to make it anew"
    for key, value in request.items():
        if previous.get(key) == value:
            continue
        if key == "files":
            rule = f"its files changed since {output} was made"
            yield Problem(path="prepare.source", value=request["source"], rule=rule, fix=fix)
        else:
            rule = f"{output} was made with {previous.get(key)!r}"
            yield Problem(path=f"prepare.{key}", value=value, rule=rule, fix=fix)
