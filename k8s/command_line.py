"""What the commands of `python -m k8s` have in common."""

from __future__ import annotations

import argparse
import math


def command_parser(command: str, docstring: str | None) -> argparse.ArgumentParser:
    """Return a parser for one command, described by the first line of its module's docstring."""
    first_line = (docstring or "").partition("\n")[0]
    description = first_line.removeprefix(f"`k8s {command}`: ")
    description = description[:1].upper() + description[1:]
    return argparse.ArgumentParser(prog=f"python -m k8s {command}", description=description)


def positive(text: str) -> float:
    """Read a number above 0; argparse names the option that holds another value."""
    number = float(text)
    if not (math.isfinite(number) and number > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a number above 0")
    return number
