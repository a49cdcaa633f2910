"""The programs of a Kubernetes control plane: where they are, how they start and how they end.

They listen on loopback only. Each dies with the process that started it, however that ends.
"""

from __future__ import annotations

import ctypes
import os
import shutil
import signal
import socket
import subprocess
from collections.abc import Sequence
from pathlib import Path

FOLDER_VARIABLE = "KUBERNETES_SERVER_BIN"
PROGRAMS = ("etcd", "kube-apiserver", "kube-controller-manager", "kube-scheduler", "kubectl")

_PR_SET_PDEATHSIG = 1
_STOP_SECONDS = 20


class MissingPrograms(RuntimeError):
    """The server programs are not there. Never a reason to skip: this suite exists to run them."""


def find_programs() -> dict[str, Path]:
    """Return the path of every server program.

    Raises:
        MissingPrograms: The variable is not set, or a program is in neither its folder nor PATH.
    """
    folder = os.environ.get(FOLDER_VARIABLE, "")
    if not folder:
        raise MissingPrograms(f"{FOLDER_VARIABLE} is not set; see docs/operating.md, 'Tests'")
    found = {name: shutil.which(name, path=f"{folder}:{os.environ['PATH']}") for name in PROGRAMS}
    missing = [name for name, path in found.items() if path is None]
    if missing:
        raise MissingPrograms(f"{FOLDER_VARIABLE}={folder!r}: lacks {', '.join(missing)}")
    return {name: Path(path) for name, path in found.items() if path is not None}


def free_port() -> int:
    with socket.socket() as probe:
        probe.bind(("127.0.0.1", 0))
        return int(probe.getsockname()[1])


class Server:
    """One running program, with its log."""

    def __init__(self, program: Path, arguments: Sequence[str], *, directory: Path) -> None:
        self.log = directory / f"{program.name}.log"
        with self.log.open("ab") as log:
            self._process = subprocess.Popen(
                [program, *arguments],
                stdout=log,
                stderr=log,
                cwd=directory,
                preexec_fn=_die_with_parent,
            )

    def check(self) -> None:
        """Raise if the program has ended."""
        if self._process.poll() is not None:
            tail = "\n".join(self.log.read_text(errors="replace").splitlines()[-20:])
            raise RuntimeError(f"{self.log.name} ended with {self._process.returncode}:\n{tail}")

    def stop(self) -> None:
        self._process.terminate()
        try:
            self._process.wait(_STOP_SECONDS)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait()


def _die_with_parent() -> None:
    ctypes.CDLL(None).prctl(_PR_SET_PDEATHSIG, signal.SIGKILL)
