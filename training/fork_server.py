"""A process that has imported everything once and becomes a new rank, or a new launcher, in milliseconds.

An in-job restart on a GPU spends 10 of its 20 seconds on imports. Each node keeps one server (a child
of `launch`, so that it survives a killed launcher); the launcher that is forked from it keeps another,
forked from itself, for its ranks. Nothing that holds CUDA is ever forked: the server only imports.

A new process is forked twice, so that its parent is the process that asked for it (which adopts
orphans): wait status, signals and process groups are as if it had been started there.
"""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import os
import signal
import socket
import subprocess
import sys
import tempfile
import threading
import time
import traceback
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NoReturn

from training.errors import EXIT_RETRY
from training.processes import adopt_orphans

POLL_SECONDS = 0.02
_LENGTH_BYTES = 4

log = logging.getLogger(__name__)

Main = Callable[[list[str]], int]


class ForkServerLost(Exception):
    """The server has died."""


class ForkedProcess:
    """A child from a fork server, with the part of `subprocess.Popen` that torch's agent and we use."""

    stdout = None
    stderr = None
    stdin = None

    def __init__(self, pid: int, args: Sequence[str]) -> None:
        self.pid, self.args = pid, list(args)
        self.returncode: int | None = None

    def poll(self) -> int | None:
        """Return the exit code, minus the signal if it died of one, or None while it runs."""
        if self.returncode is None:
            pid, status = os.waitpid(self.pid, os.WNOHANG)
            if pid:
                self.returncode = os.waitstatus_to_exitcode(status)
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end.

        Raises:
            subprocess.TimeoutExpired: It still runs after `timeout` seconds.
        """
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0.0)
            time.sleep(POLL_SECONDS)
        return code

    def send_signal(self, number: int) -> None:
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        self.send_signal(signal.SIGKILL)


class ForkServer:
    """The owner's side of a server."""

    def __init__(self, connection: socket.socket, pid: int) -> None:
        self._connection, self.pid = connection, pid

    @classmethod
    def start(cls, command: Sequence[str], *, environ: Mapping[str, str]) -> ForkServer:
        """Start a server as a program of its own, which gets the number of its socket as last argument."""
        ours, theirs = socket.socketpair()
        adopt_orphans()
        with theirs:
            process = subprocess.Popen(
                [*command, str(theirs.fileno())],
                env=dict(environ),
                pass_fds=[theirs.fileno()],
                start_new_session=True,
            )
        return cls(ours, process.pid)

    @classmethod
    def fork(cls, main: Main) -> ForkServer:
        """Make a server out of a copy of this process; call it before the first thread."""
        ours, theirs = socket.socketpair()
        adopt_orphans()
        pid = os.fork()
        if pid == 0:
            ours.close()
            serve(theirs, main)
        theirs.close()
        return cls(ours, pid)

    def spawn(self, arguments: Sequence[str], environ: Mapping[str, str]) -> ForkedProcess:
        """Start a process, in a session of its own; waits for the imports if they are not done yet.

        Raises:
            ForkServerLost: The server is gone.
        """
        try:
            _send(self._connection, {"arguments": list(arguments), "environ": dict(environ)})
            reply = _receive(self._connection)
        except OSError as error:
            raise ForkServerLost(str(error)) from error
        if reply is None:
            raise ForkServerLost("it has ended")
        return ForkedProcess(int(reply["pid"]), arguments)

    def close(self) -> None:
        """End the server; processes that it made live on."""
        self._connection.close()


def serve(connection: socket.socket, main: Main) -> NoReturn:
    """Be a server until the owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError):
        while request := _receive(connection):
            middle = os.fork()
            if middle == 0:
                middle = os.getpid()
                if os.fork() == 0:
                    _become(connection, request, main, parent=middle)
                os._exit(0)
            os.waitpid(middle, 0)
    os._exit(0)


def _become(connection: socket.socket, request: Mapping[str, Any], main: Main, *, parent: int) -> NoReturn:
    os.setsid()
    while os.getppid() == parent:
        time.sleep(0.001)
    # Only now: as soon as the owner knows the pid, it may wait for it and signal its process group
    _send(connection, {"pid": os.getpid()})
    connection.close()
    signal.signal(signal.SIGINT, signal.default_int_handler)
    os.environ.clear()
    os.environ.update(request["environ"])
    tempfile.tempdir = None
    sys.argv = [sys.argv[0], *request["arguments"]]
    os._exit(_run_to_end(main, list(request["arguments"])))


def _run_to_end(main: Main, arguments: list[str]) -> int:
    """Run a program as the interpreter would, without the slow end of the interpreter."""
    code: Any = EXIT_RETRY
    try:
        code = main(arguments)
    except SystemExit as end:
        code = end.code
    except BaseException:  # noqa: BLE001 - process boundary
        traceback.print_exc()
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    return code if isinstance(code, int) else int(code is not None)


def _send(connection: socket.socket, message: Mapping[str, Any]) -> None:
    data = json.dumps(message).encode()
    connection.sendall(len(data).to_bytes(_LENGTH_BYTES, "big") + data)


def _receive(connection: socket.socket) -> dict[str, Any] | None:
    """Return the next message, or None once the other side is gone."""
    header = connection.recv(_LENGTH_BYTES, socket.MSG_WAITALL)
    if len(header) < _LENGTH_BYTES:
        return None
    data = connection.recv(int.from_bytes(header, "big"), socket.MSG_WAITALL)
    message: dict[str, Any] = json.loads(data)
    return message
