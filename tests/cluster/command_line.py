"""Run `python -m k8s`, and write the files that it reads."""

from __future__ import annotations

import dataclasses
import json
import subprocess
import sys
from pathlib import Path

from k8s.outputs import StackOutputs

ROOT = Path(__file__).parents[2]


def k8s(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    """Run a command to its end."""
    command = [sys.executable, "-m", "k8s", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=100)


def write_outputs(path: Path, outputs: StackOutputs) -> Path:
    """Write an outputs file as `cdk deploy` does."""
    values = dataclasses.asdict(outputs).items()
    keys = {"".join(word.title() for word in name.split("_")): str(value) for name, value in values}
    path.write_text(json.dumps({"Stack": keys}))
    return path
