from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

ROOT = Path(__file__).parents[2]


def test_two_ranks_prove_mount_and_network(tmp_path: Path) -> None:
    launcher = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node=2"]
    done = subprocess.run(
        [*launcher, "-m", "training.smoke", str(tmp_path), "1"],
        capture_output=True,
        text=True,
        cwd=ROOT,
        timeout=110,
    )
    assert done.returncode == 0, done.stderr
    result = json.loads(done.stdout.splitlines()[-1])["holdfast-smoke"]
    assert result["ranks"] == 2
    assert result["bus_gigabytes_per_second"] > 0
    assert list(tmp_path.iterdir()) == [], "the proof leaves nothing"
