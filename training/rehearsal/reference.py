"""What the undisturbed run of a recipe ends with; every disturbed run of the same shape must equal it."""

from __future__ import annotations

import hashlib
import json
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any, Self

from training.config import JobConfig
from training.errors import RunError
from training.events import read_events
from training.files import write_json
from training.rehearsal.verdict import losses

FINGERPRINT_SECONDS = 600
_FILE = "reference.json"
# What changes how a run goes, and nothing of what it computes.
_NO_PART_OF_IT = ("rehearsal", "recovery", "checkpoint", "snapshot", "kubernetes", "prepare")


@dataclass(frozen=True, kw_only=True, slots=True)
class Reference:
    """Result of a run, bit for bit."""

    losses: Mapping[tuple[int, int], float]
    """By (rank, step)."""
    state: Mapping[str, Any]
    """Step and sha256 of the last checkpoint: parameters and optimizer."""

    @classmethod
    def of_run(cls, run_dir: Path) -> Self:
        """Read it from a run that is done.

        Raises:
            RunError: Its last checkpoint cannot be read.
        """
        return cls(losses=losses(read_events(run_dir)), state=_fingerprint(run_dir))

    @classmethod
    def cached(cls, run_dir: Path, config: JobConfig) -> Self | None:
        """Return what `save` has left for a recipe of the same shape, None if there is nothing.

        Raises:
            RunError: It belongs to another recipe.
        """
        path = run_dir / _FILE
        if not path.exists():
            return None
        saved = json.loads(path.read_text())
        if saved["shape"] != _shape(config):
            raise RunError(f"--undisturbed={run_dir}: is the run of another recipe; give another directory")
        found = {(int(rank), int(step)): float(loss) for rank, step, loss in saved["losses"]}
        return cls(losses=found, state=saved["state"])

    def save(self, run_dir: Path, config: JobConfig) -> None:
        """Keep it in the directory of the run."""
        found = [[rank, step, loss] for (rank, step), loss in sorted(self.losses.items())]
        write_json(run_dir / _FILE, {"shape": _shape(config), "state": dict(self.state), "losses": found})


def _shape(config: JobConfig) -> str:
    fields = {name: value for name, value in asdict(config).items() if name not in _NO_PART_OF_IT}
    fields["job"] = {key: value for key, value in fields["job"].items() if key not in ("name", "spares")}
    return hashlib.sha256(json.dumps(fields, sort_keys=True, default=str).encode()).hexdigest()


def _fingerprint(run_dir: Path) -> dict[str, Any]:
    """Return step and sha256 of a run's last checkpoint, as a process of its own sees it."""
    command = [sys.executable, "-m", "training", "fingerprint", str(run_dir)]
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=FINGERPRINT_SECONDS)
    except subprocess.TimeoutExpired:
        raise RunError(f"{run_dir}: its last checkpoint was not read in {FINGERPRINT_SECONDS} s") from None
    if done.returncode != 0:
        raise RunError(f"{run_dir}: its last checkpoint cannot be read\n{done.stderr.strip()}")
    value = json.loads(done.stdout)
    return {"step": value["step"], "sha256": value["sha256"]}
