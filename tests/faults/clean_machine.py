"""A machine of its own for a command, and what the command has left on it.

The command gets a pid and a mount namespace with an empty /dev/shm and TMPDIR, so that whatever else runs
on this machine is neither seen nor blamed.
"""

from __future__ import annotations

import os
import subprocess
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path

from training.rehearsal.isolation import Isolation

# Built into the shell, so that looking starts no process. Sockets are files in TMPDIR.
_LOOK = "echo /proc/[0-9]* /dev/shm/* /dev/shm/.[!.]* $TMPDIR/* $TMPDIR/.[!.]*; cat /proc/mounts"
_SCRIPT = f"""
{{ {_LOOK}; }} > "$LISTS/before"
"$@"
code=$?
{{ {_LOOK}; }} > "$LISTS/after"
exit $code
"""


@dataclass(frozen=True, kw_only=True, slots=True)
class CleanMachine:
    """Runs commands, each of which must leave it as it was."""

    isolation: Isolation
    lists: Path
    """Directory for what was seen before and after."""

    def run(self, command: Sequence[str], environ: Mapping[str, str]) -> subprocess.CompletedProcess[str]:
        """Run a command to its end."""
        variables = {**os.environ, **environ, **self.isolation.environ("machine"), "LISTS": str(self.lists)}
        return subprocess.run(
            self.isolation.command("machine", ["sh", "-c", _SCRIPT, "sh", *command]),
            env=variables,
            capture_output=True,
            text=True,
        )

    def leftovers(self) -> set[str]:
        """Return processes, files, sockets and mounts that the last command left."""
        before, after = (set((self.lists / name).read_text().split()) for name in ("before", "after"))
        return after - before
