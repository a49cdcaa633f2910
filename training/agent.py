"""One node's `ft_launcher`: NVRx's launcher with Holdfast's changes, as a child of `launch`.

python -m training.agent serve RECIPE SOCKET            be the node's fork server
python -m training.agent run RUN_DIR RECIPE ARGUMENTS   be a launcher, where there is no fork server
"""

from __future__ import annotations

import os
import socket
import sys
from pathlib import Path

from training import environment
from training.config import load_recipe
from training.errors import HoldfastError
from training.events import EventLog
from training.fork_server import ForkServer, serve

EXIT_CONTROL_RETURNED = 75


def main(arguments: list[str]) -> int:
    """Be a fork server or a launcher; print errors that people can act on without a traceback."""
    try:
        return _run(arguments)
    except HoldfastError as error:
        for line in str(error).splitlines():
            print(f"error: {line}", file=sys.stderr)  # noqa: T201
        environment.leave_exit_code(error.exit_code)
        return error.exit_code


def _run(arguments: list[str]) -> int:
    command, *rest = arguments
    if command == "serve":
        recipe, descriptor = rest
        _preload(Path(recipe))
        serve(socket.socket(fileno=int(descriptor)), main)
    return _run_launcher(Path(rest[0]), Path(rest[1]), rest[2:])


def _run_launcher(run_dir: Path, recipe: Path, arguments: list[str]) -> int:
    workers = None
    if environment.warm_workers():
        _preload(recipe)  # done already in a copy of the fork server
        workers = ForkServer.fork(_be_worker)

    from nvidia_resiliency_ext.fault_tolerance import launcher

    from training import nvrx_changes, nvrx_rendezvous

    with EventLog(run_dir, role="launcher", node=environment.node_name()) as events:
        round_file = Path(os.environ[environment.ROUND_FILE])
        nvrx_changes.apply_to_launcher(events, round_file, workers=workers)
        try:
            launcher.main(arguments)
        except SystemExit as end:
            if nvrx_rendezvous.ControlReturned.raised:
                return EXIT_CONTROL_RETURNED
            return int(end.code or 0)
    return 0


def _preload(recipe: Path) -> None:
    from training.warm import preload

    preload(load_recipe(recipe))


def _be_worker(arguments: list[str]) -> int:
    from training import writer_server
    from training.__main__ import main as training_main

    writer_server.start()
    return training_main(arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
