"""`training control`: the store outside all ranks, where launchers meet and process groups are made.

It runs NVRx's control plane with the changes of `training/nvrx_changes.py`, in a child that it watches.
It ends with 0 only when the run is over, so that Kubernetes restarts it in every other case. After an
error, or when its store does not answer, it begins again with an empty one, on which the launchers form
a new round; an error that comes back at once (such as a port in use) ends it with 1.
"""

from __future__ import annotations

import argparse
import contextlib
import errno
import logging
import os
import select
import signal
import socket
import subprocess
import sys
import threading
import time
from datetime import timedelta
from pathlib import Path
from types import FrameType
from typing import Any, BinaryIO

from training.config import JobConfig, load_recipe
from training.errors import EXIT_CONFIG, EXIT_DONE, EXIT_RETRY, EXIT_STOPPED, ConfigError
from training.launcher_arguments import control_arguments
from training.processes import die_with_parent

DEFAULT_PORT = 29500
LINGER_SECONDS = 10.0
RESTART_PAUSE_SECONDS = 1.0
QUICK_FAILURE_SECONDS = 30.0
QUICK_FAILURES = 5
# From a cold file system, imports take minutes.
START_SECONDS = 300.0
PULSE_SECONDS = 1.0
# Clients of a store that is stopped wait for ever, whatever their timeout: killed, it sets them free.
SILENCE_SECONDS = 10.0
# A second look, for a parent that was stopped along with its child.
SECOND_LOOK_SECONDS = 2.0

log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Run `training control`."""
    parser = argparse.ArgumentParser(prog="training control", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path, help="TOML file")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on; default: %(default)s, all")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="default: %(default)s")
    parser.add_argument(
        "--linger-seconds",
        type=float,
        default=LINGER_SECONDS,
        help="time that late spares get to see the end of the run; default: %(default)s",
    )
    # the number of a pipe: be the child that serves
    parser.add_argument("--pulse", type=int, help=argparse.SUPPRESS)
    args = parser.parse_args(arguments)
    config = load_recipe(args.recipe)
    if not 0 < args.port < 65536:
        raise ConfigError.of("--port", args.port, "must be from 1 to 65535", "change it")
    if args.pulse is None:
        _check_host(args.host)
        return Keeper([sys.executable, "-m", "training", "control", *arguments]).run()
    die_with_parent()
    return serve(config, host=args.host, port=args.port, linger_seconds=args.linger_seconds, pulse=args.pulse)


def _check_host(host: str) -> None:
    """Refuse a name that does not exist, and other machines' addresses; what may pass is left alone."""
    rule, fix = "is no address of this machine", "use 0.0.0.0, or an address of an interface"
    try:
        found = socket.getaddrinfo(host, 0, type=socket.SOCK_STREAM)
    except UnicodeError as error:
        raise ConfigError.of("--host", host, rule, fix) from error
    except socket.gaierror as error:
        if error.errno == socket.EAI_NONAME:
            raise ConfigError.of("--host", host, rule, fix) from error
        return
    if not any(_is_own(family, address) for family, *_, address in found):
        raise ConfigError.of("--host", host, rule, fix)


def _is_own(family: int, address: Any) -> bool:
    try:
        socket.create_server(address[:2], family=family).close()
    except OSError as error:
        return error.errno != errno.EADDRNOTAVAIL
    return True


def serve(config: JobConfig, *, host: str, port: int, linger_seconds: float, pulse: int) -> int:
    """Serve until the run is over, or until a signal, and return the exit code.

    Args:
        config: The recipe of the run.
        host: Address to listen on.
        port: TCP port to listen on.
        linger_seconds: Time that late spares get to see the end of the run.
        pulse: Pipe that takes a byte each time that the store has answered.
    """
    from nvidia_resiliency_ext.fault_tolerance import control_plane

    from training import nvrx_changes

    run_ended = nvrx_changes.apply_to_control(launchers=config.job.launchers, linger_seconds=linger_seconds)
    os.write(pulse, b".")  # the imports are done: from now on, silence means something
    # not before: two threads that import torch at once get in each other's way
    threading.Thread(target=_beat, args=(pulse, host, port), daemon=True).start()
    try:
        control_plane.run(control_plane.parse_args(control_arguments(config, host=host, port=port)))
    except Exception as error:  # noqa: BLE001 - process boundary
        log.error("control store failed: %s: %s", type(error).__name__, error)
        return EXIT_RETRY
    return EXIT_DONE if run_ended() else EXIT_STOPPED


class Keeper:
    """Keeps one serving child, and replaces it when it fails or falls silent."""

    def __init__(self, command: list[str]) -> None:
        self._command = command
        self._child: subprocess.Popen[bytes] | None = None
        self._told_to_stop = False

    def run(self) -> int:
        """Return the exit code of the program."""
        for number in (signal.SIGTERM, signal.SIGINT):
            signal.signal(number, self._on_signal)
        failures = 0
        while not self._told_to_stop:
            started = time.monotonic()
            code = self._serve_once()
            if code in (EXIT_DONE, EXIT_STOPPED, EXIT_CONFIG):
                return code
            failures = failures + 1 if time.monotonic() - started < QUICK_FAILURE_SECONDS else 1
            if failures >= QUICK_FAILURES:
                log.error("control store failed %d times in a row, giving up", failures)
                return EXIT_RETRY
            log.error("control store ended with %d, beginning again with an empty one", code)
            time.sleep(RESTART_PAUSE_SECONDS)
        return EXIT_STOPPED

    def _serve_once(self) -> int:
        read_end, write_end = os.pipe()
        with os.fdopen(read_end, "rb") as pulses:
            self._child = subprocess.Popen([*self._command, f"--pulse={write_end}"], pass_fds=[write_end])
            os.close(write_end)
            if self._told_to_stop:
                self._child.terminate()
            patience = START_SECONDS
            while _has_data(pulses, patience) or _has_data(pulses, SECOND_LOOK_SECONDS):
                if not os.read(read_end, 4096):
                    return self._child.wait()
                patience = SILENCE_SECONDS
        log.error("control store did not answer for %g s: killing it", patience)
        self._child.kill()
        return self._child.wait()

    def _on_signal(self, number: int, frame: FrameType | None) -> None:
        self._told_to_stop = True
        if self._child is not None and self._child.poll() is None:
            self._child.terminate()


def _has_data(file: BinaryIO, seconds: float) -> bool:
    return bool(select.select([file], [], [], seconds)[0])


def _beat(pulse: int, host: str, port: int) -> None:
    """Tell the parent each time that the store has answered a client."""
    from torch._C._distributed_c10d import TCPStore

    address = "127.0.0.1" if host == "0.0.0.0" else host
    while True:
        with contextlib.suppress(OSError, RuntimeError):
            socket.create_connection((address, port), timeout=PULSE_SECONDS).close()
            timeout = timedelta(seconds=SILENCE_SECONDS)
            store = TCPStore(address, port, is_master=False, wait_for_workers=False, timeout=timeout)
            while True:
                store.check(["holdfast/pulse"])
                os.write(pulse, b".")
                time.sleep(PULSE_SECONDS)
        time.sleep(PULSE_SECONDS)
