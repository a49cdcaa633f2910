"""Command line of the training half: `python -m training COMMAND`."""

from __future__ import annotations

import importlib
import logging
import sys

from training import environment
from training.errors import EXIT_CONFIG, HoldfastError
from training.schema import suggest

# command -> (module whose `main(argv)` runs it, one line for people); imported only when it is chosen,
# so that the launcher does not pay for torch
COMMANDS = {
    "prepare": ("training.prepare", "text to memory-mapped token shards"),
    "launch": ("training.launch", "start and supervise this node's ranks; a pod's process 1"),
    "control": ("training.control", "the rendezvous store outside all ranks"),
    "run": ("training.worker", "be one rank (started by launch or torchrun)"),
    "rehearse": (
        "training.rehearse",
        "a whole run with planned faults on this machine, and its verdict",
    ),
    "goodput": ("training.goodput", "where a run's wall time went"),
    "export": ("training.export", "checkpoint to a Hugging Face directory"),
    "checkpoint": ("training.checkpoint_command", "list, verify, explain and prune a run's saved states"),
    "fingerprint": ("training.fingerprint", "sha256 of a checkpoint's full tensors"),
}


def main(arguments: list[str]) -> int:
    """Run a command; print errors that people can act on without a traceback."""
    logging.basicConfig(
        level=logging.INFO, format="%(asctime)s %(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    # NVRx logs every start and end of its worker at INFO
    logging.getLogger("nvidia_resiliency_ext").setLevel(logging.WARNING)
    if not arguments or arguments[0] in ("-h", "--help"):
        print(_usage())  # noqa: T201
        return 0 if arguments else EXIT_CONFIG
    command, *rest = arguments
    if command not in COMMANDS:
        return _fail(f"COMMAND={command!r}: unknown; {suggest(command, list(COMMANDS))}", EXIT_CONFIG)
    try:
        module = importlib.import_module(COMMANDS[command][0])
        return int(module.main(rest))
    except HoldfastError as error:
        return _fail(str(error), error.exit_code)
    except SystemExit as end:  # argparse ends with 2 at a wrong option, and with 0 after --help
        return EXIT_CONFIG if end.code == 2 else int(end.code or 0)
    except KeyboardInterrupt:
        return 130


def _fail(message: str, code: int) -> int:
    for line in message.splitlines():
        print(f"error: {line}", file=sys.stderr)  # noqa: T201
    environment.leave_exit_code(code)
    return code


def _usage() -> str:
    lines = [f"  {name:12} {text}" for name, (_, text) in COMMANDS.items()]
    return "\n".join(["usage: python -m training COMMAND [--help]", "", *lines])


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
