"""What the commands of `python -m k8s` have in common."""

from __future__ import annotations

import argparse
import sys
from typing import NoReturn

from training.errors import EXIT_CONFIG


class CommandParser(argparse.ArgumentParser):
    """Arguments of one command. A wrong one is a wrong setting: `doctor` means something else by 2."""

    def __init__(self, command: str, description: str | None) -> None:
        """Name the command, and describe it by the first line of `description`."""
        first_line = (description or "").partition("\n")[0]
        super().__init__(prog=f"python -m k8s {command}", description=first_line)

    def error(self, message: str) -> NoReturn:
        self.print_usage(sys.stderr)
        self.exit(EXIT_CONFIG, f"error: {message}\n")
