"""Whole rehearsals: two nodes of real launchers, a control store, real kills."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.tiny import MODEL_TOML

ROOT = Path(__file__).parents[2]
pytestmark = pytest.mark.timeout(600)

RECIPE = """
version = 1
[job]
name = "rehearsal-test"
nodes = 2
ranks_per_node = 1
{model}[data]
path = "{data}"
sequence_length_tokens = 32
global_batch_samples = 4
[training]
steps = 12
device = "cpu"
[checkpoint]
every_steps = 4
deadline_seconds = 60.0
[snapshot]
every_steps = 1
[recovery]
layers = "both"
group_timeout_seconds = 4.0
soft_timeout_seconds = 20.0
hard_timeout_seconds = 40.0
barrier_timeout_seconds = 90.0
"""
FAULT = """
[[rehearsal.faults]]
kind = "{kind}"
rank = {rank}
step = {step}
point = "{point}"
"""


def write_recipe(path: Path, data: Path, *faults: dict[str, Any], text: str = RECIPE) -> Path:
    recipe = path / "recipe.toml"
    planned = "".join(FAULT.format(**fault) for fault in faults)
    recipe.write_text(text.format(data=data, model=MODEL_TOML) + planned)
    return recipe


@pytest.fixture(autouse=True)
def temporary(monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    """Give the test a temporary directory with a short path, and fail it if it leaves anything there."""
    with tempfile.TemporaryDirectory(prefix="t", dir="/tmp") as directory:
        monkeypatch.setenv("TMPDIR", directory)
        yield
        assert list(Path(directory).iterdir()) == []


def start(recipe: Path, run_dir: Path, *options: str) -> subprocess.Popen[str]:
    environ = {**os.environ, "PYTHONPATH": str(ROOT), "HF_HUB_OFFLINE": "1"}
    command = [sys.executable, "-m", "training", "rehearse", str(recipe), "--run-dir", str(run_dir), *options]
    return subprocess.Popen(
        command,
        env=environ,
        stdout=subprocess.PIPE,
        stderr=subprocess.PIPE,
        text=True,
        start_new_session=True,
    )


def processes_of(run_dir: Path) -> list[str]:
    """Return command lines that mention the run directory."""
    found = []
    for entry in Path("/proc").iterdir():
        try:
            line = (entry / "cmdline").read_bytes().replace(b"\0", b" ").decode(errors="replace")
        except OSError:
            continue
        if str(run_dir) in line:
            found.append(line)
    return found


def test_exception_and_sigkill_leave_no_trace(tmp_path: Path, data: Path) -> None:
    recipe = write_recipe(
        tmp_path,
        data,
        {"kind": "exception", "rank": 1, "step": 6, "point": "backward"},
        {"kind": "sigkill", "rank": 0, "step": 10, "point": "before_optimizer"},
    )
    process = start(recipe, tmp_path / "run", "--json")
    output, errors = process.communicate()
    assert process.returncode == 0, errors
    verdict = json.loads(output)
    assert verdict["passed"]
    # state comes back from memory, and both faults hit before a step was done
    assert (verdict["recovered"], verdict["steps_lost"]) == (2, 0)
    assert [fault["layer"] for fault in verdict["faults"]] == ["in-process", "in-job"]
    assert verdict["verdict"].startswith("VERDICT recovered=2/2 steps_lost=0 identical_loss=yes")
    assert processes_of(tmp_path / "run") == []


def test_run_directory_must_be_empty(tmp_path: Path, data: Path) -> None:
    (tmp_path / "run" / "disturbed").mkdir(parents=True)
    process = start(write_recipe(tmp_path, data), tmp_path / "run")
    _, errors = process.communicate()
    assert process.returncode == 64
    assert "is not empty; give an empty --run-dir" in errors


def test_configuration_error_is_one_line_and_64(tmp_path: Path) -> None:
    recipe = write_recipe(tmp_path, tmp_path / "nowhere")
    process = start(recipe, tmp_path / "run")
    _, errors = process.communicate()
    assert process.returncode == 64, errors
    assert "data.path" in errors
    assert "Traceback" not in errors


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_interrupted_rehearsal_leaves_nothing_behind(
    tmp_path: Path, data: Path, number: signal.Signals
) -> None:
    process = start(write_recipe(tmp_path, data), tmp_path / "run")
    assert process.stdout is not None
    line = process.stdout.readline()
    assert "ranks started" in line
    process.send_signal(number)
    process.communicate()
    assert process.returncode in (130, 143)
    assert processes_of(tmp_path / "run") == []


def test_too_many_random_faults_name_the_length_of_the_run(tmp_path: Path, data: Path) -> None:
    """GIVEN more random faults than the run has room for THEN the recipe's length is named."""
    recipe = write_recipe(tmp_path, data)
    process = start(recipe, tmp_path / "run", "--random-faults", "50", "--seed", "3")
    _, errors = process.communicate()
    assert process.returncode == 64
    assert "training.steps=12: is too short for 50 faults" in errors
    assert "Traceback" not in errors
