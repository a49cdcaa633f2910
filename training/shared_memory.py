"""Remove what killed ranks leave in /dev/shm.

A rank that ends by itself cleans up; one that is SIGKILLed cannot, and its resource tracker, which
would, is killed along with it.
"""

from __future__ import annotations

import contextlib
import os
import re
from collections.abc import Iterator
from pathlib import Path

DIRECTORY = Path("/dev/shm")
_OWNED_BY_PID = re.compile(r"holdfast-(\d+)-")
_SEMAPHORE_PREFIX = "sem.mp-"


def sweep(directory: Path = DIRECTORY) -> list[Path]:
    """Remove slots whose process is gone and semaphores that nobody has mapped; return what was removed."""
    inodes = dict(_own_files(directory))
    orphans = [path for path in inodes if _has_dead_owner(path)]
    semaphores = [path for path in inodes if path.name.startswith(_SEMAPHORE_PREFIX)]
    if semaphores:
        mapped = set(_mapped_inodes())
        orphans += [path for path in semaphores if inodes[path] not in mapped]
    for path in orphans:
        path.unlink(missing_ok=True)
    return orphans


def _own_files(directory: Path) -> Iterator[tuple[Path, int]]:
    for path in directory.iterdir():
        with contextlib.suppress(FileNotFoundError):
            status = path.stat()
            if path.is_file() and status.st_uid == os.getuid():
                yield path, status.st_ino


def _has_dead_owner(path: Path) -> bool:
    owner = _OWNED_BY_PID.match(path.name)
    return owner is not None and not Path(f"/proc/{owner[1]}").exists()


def _mapped_inodes() -> Iterator[int]:
    """Yield the inodes of shared memory that some process of this machine, or pod, has mapped.

    Not the names: in the process that made it, a semaphore is mapped under a temporary one.
    """
    for maps in Path("/proc").glob("[0-9]*/maps"):
        with contextlib.suppress(OSError):
            yield from (
                int(line.split()[4]) for line in maps.read_text().splitlines() if str(DIRECTORY) in line
            )
