"""`training control`: the store outside all ranks, where launchers meet and process groups are made.

It runs NVRx's control plane with the changes of `training/nvrx_changes.py`. It ends with 0 only when
the run is over, so that Kubernetes restarts it in every other case. An error inside (such as two
launchers with one node index) makes it begin again with an empty store, on which the launchers form
a new round; one that comes back at once (such as a port in use) ends it with 1.
"""

from __future__ import annotations

import argparse
import logging
import os
import sys
import time
from pathlib import Path

from training import environment
from training.config import JobConfig, load_recipe
from training.errors import EXIT_DONE, EXIT_RETRY, EXIT_STOPPED
from training.launcher_arguments import control_arguments

DEFAULT_PORT = 29500
LINGER_SECONDS = 10.0
RESTART_PAUSE_SECONDS = 1.0
QUICK_FAILURE_SECONDS = 30.0
QUICK_FAILURES = 5

log = logging.getLogger(__name__)


def main(arguments: list[str]) -> int:
    """Run `training control`."""
    parser = argparse.ArgumentParser(prog="training control", description=__doc__.split("\n")[0])
    parser.add_argument("recipe", type=Path, help="TOML file")
    parser.add_argument("--host", default="0.0.0.0", help="address to listen on")
    parser.add_argument("--port", type=int, default=DEFAULT_PORT, help="default: %(default)s")
    parser.add_argument(
        "--linger-seconds",
        type=float,
        default=LINGER_SECONDS,
        help="time that late spares get to see the end of the run; default: %(default)s",
    )
    args = parser.parse_args(arguments)
    return run_control(
        load_recipe(args.recipe),
        host=args.host,
        port=args.port,
        linger_seconds=args.linger_seconds,
    )


def run_control(config: JobConfig, *, host: str, port: int, linger_seconds: float) -> int:
    """Serve until the run is over, or until a signal, and return the exit code.

    Args:
        config: The recipe of the run.
        host: Address to listen on.
        port: TCP port to listen on.
        linger_seconds: Time that late spares get to see the end of the run.
    """
    from nvidia_resiliency_ext.fault_tolerance import control_plane

    from training import nvrx_changes

    started = time.monotonic()
    run_ended = nvrx_changes.apply_to_control(linger_seconds)
    try:
        control_plane.run(control_plane.parse_args(control_arguments(config, host=host, port=port)))
    except Exception as error:  # noqa: BLE001 - process boundary
        reason = f"{type(error).__name__}: {error}"
        return _begin_again(reason, seconds=time.monotonic() - started)
    return EXIT_DONE if run_ended() else EXIT_STOPPED


def _begin_again(reason: str, *, seconds: float) -> int:
    """Replace this program by itself; return an exit code where that has not helped.

    Args:
        reason: Why the store failed.
        seconds: How long it had served.
    """
    failures = (
        environment.integer(environment.CONTROL_FAILURES, 0) + 1 if seconds < QUICK_FAILURE_SECONDS else 1
    )
    if failures >= QUICK_FAILURES:
        log.error("control store failed %d times in a row, giving up: %s", failures, reason)
        return EXIT_RETRY
    log.error("control store failed, beginning again: %s", reason)
    time.sleep(RESTART_PAUSE_SECONDS)
    os.environ[environment.CONTROL_FAILURES] = str(failures)
    # A new program image is the one sure way to get rid of the old store.
    os.execv(sys.executable, sys.orig_argv)
