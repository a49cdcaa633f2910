"""What keeps simulated nodes apart on one machine: mount, pid and host name namespaces, by util-linux.

Each node has its own process table, its own name, and one private tmpfs at /dev/shm, which also holds its
TMPDIR: no rank can open another node's memory, and the kernel frees all of it with the node's process 1.
Nothing lies in the machine's own file systems, so that nothing is left there however a rehearsal ends. The
network and the run directory are shared, as they are in a cluster.

Needs root, or user namespaces that an ordinary user may make. Some containers allow neither.
"""

from __future__ import annotations

import contextlib
import logging
import os
import shutil
import subprocess
import tempfile
from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from training import environment
from training.errors import ConfigError

PRIVATE = Path("/dev/shm")
_TEMPORARY = PRIVATE / "tmp"
_PROBE_SECONDS = 20
LOCAL_DISK = "HOLDFAST_SIMULATED_DISK"
"""Variable that names the directory of a node's own disk (checkpoint.local.directory); empty for none."""
_DIES_WITH_US = ("setpriv", "--pdeathsig", "KILL")
_NAMESPACES = ("unshare", "--mount", "--pid", "--uts", "--mount-proc", "--fork", "--kill-child=SIGKILL")
_AS_USER = ("--user", "--map-root-user")
_ENTER = f"""
set -e
mount -t tmpfs -o mode=1777 holdfast {PRIVATE}
mkdir {_TEMPORARY}
echo "$0" > /proc/sys/kernel/hostname
printf "127.0.0.1 localhost\\n${{{environment.ADDRESS}:-127.0.0.1}} $0\\n" > {PRIVATE}/hosts
mount --bind {PRIVATE}/hosts /etc/hosts
if [ -n "${LOCAL_DISK}" ]; then mkdir -p "${LOCAL_DISK}"; mount -t tmpfs holdfast "${LOCAL_DISK}"; fi
exec "$@"
"""

log = logging.getLogger(__name__)


@dataclass(frozen=True, kw_only=True, slots=True)
class Isolation:
    """How a node's processes are started, and where its memory is."""

    prefix: tuple[str, ...] = ()
    """Command that makes the namespaces; empty where nodes share the machine."""
    shared: Path = PRIVATE
    """Where nodes that share the machine have a directory each."""

    @property
    def is_real(self) -> bool:
        return bool(self.prefix)

    def command(self, node: str, command: Sequence[str]) -> list[str]:
        """Return the command line that runs `command` as process 1 of a node."""
        return [*self.prefix, node, *command] if self.is_real else list(command)

    def environ(self, node: str) -> dict[str, str]:
        """Return the variables that keep a node's files in its own memory."""
        if self.is_real:
            return {"TMPDIR": str(_TEMPORARY), environment.SHARED_MEMORY: str(PRIVATE)}
        directory = self.shared / node
        directory.mkdir(exist_ok=True)
        return {"TMPDIR": str(directory), environment.SHARED_MEMORY: str(directory)}

    def free_memory(self, node: str) -> None:
        """Remove the memory of a node whose processes are dead; the kernel has done so with its namespace."""
        if not self.is_real:
            shutil.rmtree(self.shared / node, ignore_errors=True)

    def check_visible(self, path: Path, *, setting: str) -> None:
        """Refuse a path that nodes could not see.

        Raises:
            ConfigError: It lies where every node has its own memory.
        """
        if self.is_real and path.resolve().is_relative_to(PRIVATE):
            rule = f"lies in {PRIVATE}, of which every simulated node has its own"
            raise ConfigError.of(setting, str(path), rule, "use a directory on a disk")


@contextmanager
def isolation() -> Iterator[Isolation]:
    """Yield the strongest isolation that this machine permits; a weaker one is a warning with its cost."""
    prefix = _working_prefix()
    if prefix:
        yield Isolation(prefix=prefix)
        return
    log.warning(
        "no mount and pid namespaces (unshare of util-linux, as root or with user namespaces): simulated "
        "nodes share /dev/shm and processes, so it is not proven that none reads another's memory"
    )
    with tempfile.TemporaryDirectory(prefix="hf-", dir=PRIVATE, ignore_cleanup_errors=True) as shared:
        yield Isolation(shared=Path(shared))


def _working_prefix() -> tuple[str, ...]:
    if not all(shutil.which(program) for program in ("setpriv", "unshare", "mount")):
        return ()
    for options in ((), _AS_USER) if os.geteuid() == 0 else (_AS_USER,):
        prefix = (*_DIES_WITH_US, *_NAMESPACES, *options, "sh", "-c", _ENTER)
        if _works(prefix):
            return prefix
    return ()


def _works(prefix: Sequence[str]) -> bool:
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        probe = subprocess.run([*prefix, "probe", "true"], capture_output=True, timeout=_PROBE_SECONDS)
        return probe.returncode == 0
    return False
