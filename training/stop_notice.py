"""Notices that a node is about to end, other than SIGTERM; `training launch` then stops as if it had it.

HOLDFAST_STOP_FILE   a path: as soon as it exists. For whatever watches for spot interruptions or
                     maintenance of the node, such as a DaemonSet with a hostPath
HOLDFAST_STOP_AT     seconds since the epoch: the end of a capacity block. Stops one grace before it
"""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from training import environment


@dataclass(frozen=True, kw_only=True, slots=True)
class StopNotice:
    """When and by what this node will be told."""

    file: Path | None
    stop_by: float | None
    """Seconds since the epoch; None for never."""

    @classmethod
    def from_environment(cls) -> StopNotice:
        """Read the environment.

        Raises:
            ConfigError: HOLDFAST_STOP_AT is no whole number.
        """
        file = os.environ.get(environment.STOP_FILE)
        end = environment.integer(environment.STOP_AT, 0)
        return cls(
            file=Path(file) if file else None,
            stop_by=end - environment.grace_seconds() if end else None,
        )

    def is_due(self, now: float) -> bool:
        """Say whether the node has to stop now (seconds since the epoch)."""
        told = self.file is not None and self.file.exists()
        return told or (self.stop_by is not None and now >= self.stop_by)
