"""What a process holds, for tests that nothing piles up."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path


@dataclass(frozen=True, kw_only=True, slots=True)
class Use:
    """What a process holds."""

    threads: int
    descriptors: int
    memory_kib: int
    """Not shared with anybody by a file."""


def use_of(pid: int) -> Use:
    status = dict(line.split(":", 1) for line in Path(f"/proc/{pid}/status").read_text().splitlines())
    return Use(
        threads=int(status["Threads"]),
        descriptors=len(list(Path(f"/proc/{pid}/fd").iterdir())),
        memory_kib=int(status["RssAnon"].split()[0]),
    )
