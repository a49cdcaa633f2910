"""A rank that raises in step 3, always: `python -m tests.training.failing_rank RECIPE RUN_DIR`."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch

from training import __main__ as program
from training.config import load_recipe
from training.events import EventLog
from training.restart import Attempt, run_restartable


def main(arguments: list[str]) -> int:
    recipe, run_dir = map(Path, arguments)
    with EventLog(run_dir, role="rank", node="node-0", rank=0) as events:

        def train(attempt: Attempt) -> None:
            for step in range(1, 6):
                if step == 3:
                    raise ValueError(f"sample of process {os.getpid()} is bad")
                events.emit("step", step=step)
                attempt.ping()

        config, device = load_recipe(recipe), torch.device("cpu")
        run_restartable(train, config=config, run_dir=run_dir, events=events, device=device)
    return 0


if __name__ == "__main__":
    program.COMMANDS["fail"] = ("tests.training.failing_rank", "")
    sys.exit(program.main(["fail", *sys.argv[1:]]))
