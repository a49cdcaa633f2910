"""A program of several commands, each in a module of its own: what `training` and `k8s` have in common."""

from __future__ import annotations

import importlib
import os
import select
import signal
import sys
from collections.abc import Mapping, Sequence

from training.errors import EXIT_CONFIG, HoldfastError
from training.schema import suggest

Commands = Mapping[str, tuple[str, str]]
"""Command to the module whose `main(argv)` runs it, imported only when it is chosen, and a line of help."""

_EXIT_INTERRUPTED = 128 + signal.SIGINT
_EXIT_NO_READER = 128 + signal.SIGPIPE
_ARGPARSE_ERROR = 2


def run_command(program: str, commands: Commands, arguments: Sequence[str]) -> int:
    """Run a command and return its exit code; errors that people can act on come without a traceback."""
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage(program, commands))  # noqa: T201
        return 0 if arguments else EXIT_CONFIG
    command, *rest = arguments
    if command not in commands:
        return _fail(f"COMMAND={command!r}: unknown; {suggest(command, list(commands))}", EXIT_CONFIG)
    try:
        return int(importlib.import_module(commands[command][0]).main(rest))
    except HoldfastError as error:
        return _fail(str(error), error.exit_code)
    except SystemExit as end:
        return EXIT_CONFIG if end.code == _ARGPARSE_ERROR else int(end.code or 0)
    except BrokenPipeError:
        if not _is_reader_gone():
            raise  # of a socket: a rank that lost it is not done
        return _EXIT_NO_READER
    except KeyboardInterrupt:
        return _EXIT_INTERRUPTED


def _is_reader_gone() -> bool:
    """Say whether nobody reads our output any more, as after `| head`; what is left of it goes nowhere."""
    poller = select.poll()
    poller.register(sys.stdout, 0)  # an error is told unasked
    is_gone = bool(poller.poll(0))
    if is_gone:
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return is_gone


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)  # noqa: T201
    return code


def _usage(program: str, commands: Commands) -> str:
    width = max(map(len, commands))
    lines = [f"  {name:{width}}  {text}" for name, (_, text) in commands.items()]
    return "\n".join([f"usage: python -m {program} COMMAND [--help]", "", *lines])
