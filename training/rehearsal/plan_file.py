"""A recipe with another fault plan, as a file that ranks read."""

from __future__ import annotations

import json
import re
from collections.abc import Sequence
from dataclasses import asdict
from pathlib import Path

from training.config import JobConfig, load_recipe
from training.errors import ConfigError
from training.fault_config import Fault

_PLANNED = re.compile(r"^\[\[rehearsal\.faults\]\].*?(?=^\[|\Z)", re.MULTILINE | re.DOTALL)


def write_recipe(recipe: Path, faults: Sequence[Fault], run_dir: Path) -> tuple[Path, JobConfig]:
    """Write a recipe with these faults in place of its own, and return its path and what it says.

    Raises:
        ConfigError: The recipe keeps its faults in another form than [[rehearsal.faults]] tables.
    """
    text = "\n".join([_PLANNED.sub("", recipe.read_text()).rstrip(), *map(_table, faults)])
    run_dir.mkdir(parents=True, exist_ok=True)
    path = run_dir / "recipe.toml"
    path.write_text(text + "\n")
    config = load_recipe(path)
    if config.rehearsal.faults != tuple(faults):
        rule = "holds faults that are no [[rehearsal.faults]] tables"
        raise ConfigError.of("rehearsal.faults", str(recipe), rule, "write them as such tables")
    return path, config


def _table(fault: Fault) -> str:
    # JSON's strings and numbers are TOML's too
    fields = (f"{name} = {json.dumps(value)}" for name, value in asdict(fault).items())
    return "\n".join(["", "[[rehearsal.faults]]", *fields])
