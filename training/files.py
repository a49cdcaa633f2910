"""Files that a reader finds whole or not at all, also after a kill or a power cut; where they can go."""

from __future__ import annotations

import json
import logging
import os
import time
from collections.abc import Mapping
from fnmatch import fnmatchcase
from pathlib import Path
from typing import Any

from training.errors import ConfigError

logger = logging.getLogger(__name__)


def write_text(path: Path, text: str) -> None:
    """Write a file, which replaces the one that is there."""
    temporary = path.with_name(f".{path.name}.{os.getpid()}.{time.monotonic_ns()}")
    with temporary.open("w", encoding="utf-8") as file:
        file.write(text)
        file.flush()
        os.fsync(file.fileno())
    temporary.replace(path)


def write_json(path: Path, value: Mapping[str, Any]) -> None:
    write_text(path, json.dumps(value, indent=1, sort_keys=True))


def listing(directory: Path, pattern: str) -> list[Path]:
    """Return the sorted paths that match, while other processes may be removing the directories in it.

    `Path.glob` raises FileNotFoundError where a directory goes between its look and its listing, and takes
    one that may not be read for an empty one without a word.

    Args:
        directory: Where to start; may be missing.
        pattern: Names with wildcards, one for each level, hidden ones included.
    """
    found = [directory]
    for names in pattern.split("/"):
        found = [path for parent in found for path in _children(parent) if fnmatchcase(path.name, names)]
    return sorted(found)


def _children(directory: Path) -> list[Path]:
    try:
        return list(directory.iterdir())
    except (FileNotFoundError, NotADirectoryError):
        return []
    except OSError as error:
        logger.warning("%s: cannot be listed (%s): nothing in it is used", directory, error.strerror)
        return []


def fsync_directory(path: Path) -> None:
    """Make names that were added to or removed from a directory last."""
    descriptor = os.open(path, os.O_RDONLY)
    try:
        os.fsync(descriptor)
    finally:
        os.close(descriptor)


def check_writable(directory: Path, setting: str) -> None:
    """Refuse what is no directory, and what cannot become one.

    Raises:
        ConfigError: It is a file, lies below one, or may not be written.
    """
    nearest = next(place for place in (directory, *directory.parents) if place.exists())
    if not nearest.is_dir() or not os.access(nearest, os.W_OK):
        rule = f"{nearest} is no directory that can be written"
        raise ConfigError.of(setting, str(directory), rule, "give another directory")
