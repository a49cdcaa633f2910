"""Command line of the training half: `python -m training COMMAND`."""

from __future__ import annotations

import logging
import os
import sys

from training import environment
from training.command_line import run_command

# a module is imported only when it is chosen, so that the launcher does not pay for torch
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
    rank = os.environ.get("RANK")
    who = f"rank {rank} " if rank else ""  # all ranks of a node write into one log
    logging.basicConfig(
        level=logging.INFO, format=f"%(asctime)s {who}%(levelname)s %(message)s", datefmt="%H:%M:%S"
    )
    # NVRx logs every start and end of its worker at INFO
    logging.getLogger("nvidia_resiliency_ext").setLevel(logging.WARNING)
    code = run_command("training", COMMANDS, arguments)
    environment.leave_exit_code(code)
    return code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
