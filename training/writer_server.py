"""Where a rank's checkpoint worker comes from: a copy of the rank, made before it had threads or CUDA.

NVRx starts that worker as a new program, which imports torch for seconds, on the CPUs that the restarted
rank needs just then. A fork server of `multiprocessing` would import once, but for one rank alone; this
one is such a server without its start: it begins as a copy of a process that has imported everything.
"""

from __future__ import annotations

import os
import socket
import tempfile
import types
from multiprocessing import forkserver
from pathlib import Path
from typing import Any

from nvidia_resiliency_ext.checkpointing.async_ckpt import core
from torch import multiprocessing as torch_multiprocessing

from training.processes import die_with_parent


def start() -> None:
    """Fork the server, and have NVRx take its worker from it; call it before the first thread.

    It ends with this process.
    """
    # One name a rank, so that ranks that were killed leave no more than that. Not in the abstract
    # namespace, where any user of the machine could connect and have code run (CVE-2022-42919).
    address = Path(tempfile.gettempdir()) / f"writers-{os.environ.get('LOCAL_RANK', '0')}"
    address.unlink(missing_ok=True)
    listener = socket.socket(socket.AF_UNIX)
    listener.bind(str(address))
    listener.listen()
    read_end, write_end = os.pipe()
    pid = os.fork()
    if pid == 0:
        _serve(listener, read_end, write_end)
    listener.close()
    os.close(read_end)
    _adopt(str(address), write_end, pid)


def _serve(listener: socket.socket, read_end: int, write_end: int) -> None:
    os.close(write_end)
    die_with_parent()
    try:
        forkserver.main(listener.detach(), read_end, [])
    finally:
        os._exit(0)


def _adopt(address: str, write_end: int, pid: int) -> None:
    """Make it the server of this process's "forkserver" start method, and that NVRx's start method."""
    server: Any = forkserver._forkserver
    server._forkserver_address, server._forkserver_alive_fd, server._forkserver_pid = address, write_end, pid
    core.mp = types.SimpleNamespace(**{**vars(torch_multiprocessing), "get_context": _get_context})


def _get_context(method: str | None = None) -> Any:
    return torch_multiprocessing.get_context("forkserver" if method == "spawn" else method)
