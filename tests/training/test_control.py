from __future__ import annotations

import os
import socket
import subprocess
import sys
from pathlib import Path

from training import control, environment
from training.errors import EXIT_RETRY

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "training" / "recipes" / "rehearsal_cpu.toml"


def test_error_that_comes_back_at_once_ends_the_control(tmp_path: Path) -> None:
    """GIVEN a port that is in use and 3 failures before WHEN it fails twice more THEN it gives up."""
    with socket.create_server(("127.0.0.1", 0)) as taken:
        port = str(taken.getsockname()[1])
        command = [sys.executable, "-m", "training", "control", str(RECIPE), "--host", "127.0.0.1"]
        done = subprocess.run(
            [*command, "--port", port],
            env={**os.environ, environment.CONTROL_FAILURES: str(control.QUICK_FAILURES - 2)},
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=110,
            check=False,
        )
    assert done.returncode == EXIT_RETRY
    assert done.stderr.count("control store failed, beginning again") == 1
    assert f"failed {control.QUICK_FAILURES} times in a row, giving up" in done.stderr
