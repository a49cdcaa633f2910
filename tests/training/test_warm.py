"""The fork server's preparation."""

from __future__ import annotations

import subprocess
import sys

CODE = """
import gc, sys
from pathlib import Path
from training import warm
from training.config import load_recipe
gc.freeze()  # Python 3.12 starts with frozen objects
warm.preload(load_recipe(Path(sys.argv[1])))
assert "training.worker" in sys.modules
"""


def test_objects_that_are_frozen_already_do_not_stop_it() -> None:
    recipe = "training/recipes/rehearsal_cpu.toml"
    done = subprocess.run([sys.executable, "-c", CODE, recipe], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr
