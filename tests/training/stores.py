"""A store in a process of its own, to be killed or stopped."""

from __future__ import annotations

import os
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Callable
from typing import Self

from torch._C._distributed_c10d import TCPStore

from training.control_watch import STORE_ID_KEY

SERVER = """
import sys, time
from torch._C._distributed_c10d import TCPStore
store = TCPStore("127.0.0.1", int(sys.argv[1]), is_master=True, wait_for_workers=False)
print(store.port, flush=True)
time.sleep(600)
"""


class StoreProcess:
    """An empty store that lives as long as the `with` block, at most."""

    def __init__(self, *, port: int = 0) -> None:
        self._process = subprocess.Popen(
            [sys.executable, "-c", SERVER, str(port)], stdout=subprocess.PIPE, text=True
        )
        assert self._process.stdout is not None
        self.port, self.pid = int(self._process.stdout.readline()), self._process.pid

    def client(self) -> TCPStore:
        return TCPStore("127.0.0.1", self.port, is_master=False, wait_for_workers=False)

    def is_alive(self) -> bool:
        return self._process.poll() is None

    def send_signal(self, number: int) -> None:
        os.kill(self.pid, number)

    def kill(self) -> None:
        self._process.kill()
        self._process.wait()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: object) -> None:
        if self.is_alive():
            self.send_signal(signal.SIGCONT)
            self.kill()
        assert self._process.stdout is not None
        self._process.stdout.close()


def make_store(store_id: str = "store-1") -> TCPStore:
    """Return a control store in this process."""
    store = TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    store.set(STORE_ID_KEY, store_id)
    return store


def listens(endpoint: tuple[str, int]) -> bool:
    try:
        socket.create_connection(endpoint, timeout=1).close()
    except OSError:
        return False
    return True


def until(condition: Callable[[], object], *, seconds: float = 30) -> bool:
    """Say whether a condition came true in time."""
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        if condition():
            return True
        time.sleep(0.02)
    return False
