"""A process that has imported everything once and becomes a new rank, or a new launcher, in milliseconds.

An in-job restart on a GPU spends 10 of its 20 seconds on imports. Each node keeps one server (a child
of `launch`, so that it survives a killed launcher); the launcher that is forked from it keeps another,
forked from itself, for its ranks. Nothing that holds CUDA is ever forked: the server only imports.

A new process is forked twice, so that its parent is the process that asked for it (which adopts
orphans): wait status, signals and process groups are as if it had been started there. No wait of the
owner is without an end: it is process 1, and any process between can be killed for memory.
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
# From a cold file system, imports take minutes.
IMPORT_SECONDS = 300.0
REPLY_SECONDS = 30.0
_LENGTH_BYTES = 4

log = logging.getLogger(__name__)

Main = Callable[[list[str]], int]


class ForkServerLost(Exception):
    """The server has died, cannot fork or does not answer."""


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

    def __init__(self, connection: socket.socket, process: subprocess.Popen[bytes] | ForkedProcess) -> None:
        self._connection, self._process = connection, process
        self._ready = False

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
        return cls(ours, process)

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
        return cls(ours, ForkedProcess(pid, sys.argv))

    @property
    def pid(self) -> int:
        return self._process.pid

    def has_ended(self) -> bool:
        """Say whether the server is dead, and reap it."""
        return self._process.poll() is not None

    def spawn(self, arguments: Sequence[str], environ: Mapping[str, str]) -> ForkedProcess:
        """Start a process, in a session of its own; waits for the imports if they are not done yet.

        Raises:
            ForkServerLost: The server is gone, does not answer, or cannot fork. It is closed then.
        """
        try:
            self._await_ready()
            self._connection.settimeout(REPLY_SECONDS)
            _send(self._connection, {"arguments": list(arguments), "environ": dict(environ)})
            return ForkedProcess(self._reply("pid", seconds=REPLY_SECONDS), arguments)
        except (OSError, ValueError) as error:
            # Closed, so that a process that comes too late finds nobody to tell, and ends
            self.close()
            raise ForkServerLost(str(error)) from error

    def close(self) -> None:
        """End the server; processes that it made live on."""
        self._connection.close()

    def _await_ready(self) -> None:
        if not self._ready:
            self._reply("ready", seconds=IMPORT_SECONDS)
            self._ready = True

    def _reply(self, field: str, *, seconds: float) -> int:
        """Return a field of the server's next message.

        Raises:
            OSError: Nothing came in time, the server is gone, or it says that it failed.
            ValueError: The message is torn.
        """
        reply = _receive(self._connection, seconds=seconds)
        if reply is None:
            raise ConnectionError("it has ended")
        if field not in reply:
            raise ConnectionError(str(reply.get("error", reply)))
        return int(reply[field])


def serve(connection: socket.socket, main: Main) -> NoReturn:
    """Be a server until the owner is gone."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    with contextlib.suppress(OSError, ValueError):
        _send(connection, {"ready": os.getpid()})
        while request := _receive(connection):
            _fork_off(connection, request, main)
    os._exit(0)


def _fork_off(connection: socket.socket, request: Mapping[str, Any], main: Main) -> None:
    """Fork the process that forks the one asked for, and wait for its end."""
    try:
        middle = os.fork()
    except OSError as error:
        _send(connection, {"error": f"fork: {error.strerror}"})
        return
    if middle == 0:
        _be_middle(connection, request, main)
    _, status = os.waitpid(middle, 0)
    if status:
        code = os.waitstatus_to_exitcode(status)
        _send(connection, {"error": f"the process between ended with {code}"})


def _be_middle(connection: socket.socket, request: Mapping[str, Any], main: Main) -> NoReturn:
    middle = os.getpid()
    try:
        child = os.fork()
    except OSError as error:
        _send(connection, {"error": f"fork: {error.strerror}"})
        os._exit(0)
    if child == 0:
        _become(connection, request, main, parent=middle)
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


def _receive(connection: socket.socket, *, seconds: float | None = None) -> dict[str, Any] | None:
    """Return the next message, or None once the other side is gone.

    Raises:
        TimeoutError: It is not complete after `seconds`.
        ValueError: It is no JSON.
    """
    deadline = None if seconds is None else time.monotonic() + seconds
    header = _receive_exactly(connection, _LENGTH_BYTES, deadline)
    if header is None:
        return None
    data = _receive_exactly(connection, int.from_bytes(header, "big"), deadline)
    if data is None:
        return None
    message: dict[str, Any] = json.loads(data)
    return message


def _receive_exactly(connection: socket.socket, size: int, deadline: float | None) -> bytes | None:
    data = b""
    while len(data) < size:
        if deadline is not None:
            connection.settimeout(max(deadline - time.monotonic(), 0.001))
        part = connection.recv(size - len(data))
        if not part:
            return None
        data += part
    return data
