"""Measurements as JSON lines, so that a run that was cut off goes on where it was."""

from __future__ import annotations

import json
import time
from collections.abc import Iterable, Iterator, Mapping
from pathlib import Path
from typing import Any

from training.errors import ConfigError

Row = Mapping[str, Any]


class Results:
    """The rows measured so far; every row has `measurement`, the name of what produced it."""

    def __init__(self, path: Path) -> None:
        self.path = path
        path.parent.mkdir(parents=True, exist_ok=True)
        self.rows: list[Row] = list(read_rows(path)) if path.exists() else []

    def has(self, measurement: str) -> bool:
        """Say whether a measurement is there and did not fail."""
        return any(row["measurement"] == measurement and "failure" not in row for row in self.rows)

    def add(self, measurement: str, rows: Iterable[Row], **common: Any) -> None:
        """Append the rows of one measurement."""
        stamp = round(time.time())
        with self.path.open("a") as file:
            for row in rows:
                full = {"measurement": measurement, "time": stamp, **common, **row}
                file.write(json.dumps(full) + "\n")
                self.rows.append(full)


def newest(rows: Iterable[Row]) -> list[Row]:
    """Return the rows of each measurement's last success."""
    good = [row for row in rows if "failure" not in row]
    last: dict[str, int] = {}
    for row in good:
        last[row["measurement"]] = max(int(row["time"]), last.get(row["measurement"], 0))
    return [row for row in good if row["time"] == last[row["measurement"]]]


def read_rows(path: Path) -> Iterator[Row]:
    """Yield the rows of a file; of a measurement that was repeated, all of them.

    Raises:
        ConfigError: It cannot be read, or a line is no JSON.
    """
    try:
        lines = path.read_text().splitlines()
    except OSError as error:
        fix = "give a file that a run has written"
        raise ConfigError.of("--output", str(path), f"cannot be read ({error.strerror})", fix) from error
    for number, line in enumerate(lines, start=1):
        try:
            yield json.loads(line)
        except json.JSONDecodeError as error:
            rule = f"line {number} is no JSON: {error.msg}"
            raise ConfigError.of(
                "--output", str(path), rule, "remove the line, or use another file"
            ) from error
