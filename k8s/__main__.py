"""Command line of what the operator runs: `python -m k8s COMMAND`."""

from __future__ import annotations

import importlib
import sys
from pathlib import Path

# The instance table is shared with the infrastructure half; a checkout needs no installation.
sys.path.insert(0, str(Path(__file__).parent.parent / "constructs"))

from training.errors import EXIT_CONFIG, HoldfastError
from training.schema import suggest

# command -> (module whose `main(argv)` runs it, one line for people); imported only when it is chosen
COMMANDS = {
    "doctor": ("k8s.doctor", "check account, capacity and cluster, with the fix for what is wrong"),
    "render": ("k8s.render", "a recipe's manifests, as YAML"),
    "submit": ("k8s.submit", "start a recipe's Job"),
    "status": ("k8s.status", "where a run stands: step, loss, speed, restarts, goodput"),
    "logs": ("k8s.logs", "a run's logs, by node or rank"),
    "delete": ("k8s.delete", "stop a run and remove its objects"),
    "cost": ("k8s.cost", "what a configuration costs an hour, and what a run has cost"),
    "publish": ("k8s.publish", "write a run's status into its Job (runs in the control pod)"),
}


def main(arguments: list[str]) -> int:
    """Run a command; print errors that people can act on without a traceback."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())  # noqa: T201
        return 0 if arguments else EXIT_CONFIG
    command, *rest = arguments
    if command not in COMMANDS:
        return _fail(f"COMMAND={command!r}: unknown; {suggest(command, list(COMMANDS))}", EXIT_CONFIG)
    try:
        return int(importlib.import_module(COMMANDS[command][0]).main(rest))
    except HoldfastError as error:
        return _fail(str(error), error.exit_code)
    except BrokenPipeError:
        sys.stderr.close()  # the reader of a pipe has seen enough
        return 0
    except KeyboardInterrupt:
        return 130


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)  # noqa: T201
    return code


def _usage() -> str:
    lines = [f"  {name:8} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: python -m k8s COMMAND [--help]", "", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
