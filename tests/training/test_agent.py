from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

from training import environment
from training.errors import EXIT_CONFIG

ROOT = Path(__file__).parents[2]
RECIPE = ROOT / "training" / "recipes" / "rehearsal_cpu.toml"
UNKNOWN_NVRX = """
import sys
from training import agent, nvrx_version
nvrx_version.KNOWN_VERSIONS = ("0.0.1",)
sys.exit(agent.main(sys.argv[1:]))
"""


def test_launcher_that_is_configured_wrong_ends_the_run_without_a_traceback(tmp_path: Path) -> None:
    environ = {
        **os.environ,
        "PYTHONPATH": str(ROOT),
        environment.WARM_WORKERS: "0",
        environment.EXIT_FILE: str(tmp_path / "exit"),
        environment.ROUND_FILE: str(tmp_path / "round"),
    }
    command = [sys.executable, "-c", UNKNOWN_NVRX, "run", str(tmp_path), str(RECIPE)]
    done = subprocess.run(command, env=environ, capture_output=True, text=True, timeout=100, check=False)
    assert done.returncode == EXIT_CONFIG
    assert (tmp_path / "exit").read_text() == str(EXIT_CONFIG)
    assert "error: nvidia-resiliency-ext=" in done.stderr
    assert "Traceback" not in done.stderr
