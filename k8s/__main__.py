"""Command line of what the operator runs: `python -m k8s COMMAND`."""

from __future__ import annotations

import sys

from training.command_line import run_command

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
    return run_command("k8s", COMMANDS, arguments)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
