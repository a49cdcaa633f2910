"""The benchmark of the writers runs on a CPU too: its rows are whole, and a slow one is stopped."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

SMALL = ["--device", "cpu", "--width", "64", "--layers", "1", "--vocabulary", "128", "--length", "32"]


def rows(tmp_path: Path, *options: str) -> tuple[int, dict[str, dict[str, Any]]]:
    output = tmp_path / "stall.jsonl"
    command = [sys.executable, "-m", "bench.checkpoint_stall", *SMALL, "--batch", "1", "--steps", "2"]
    places = ["--directory", str(tmp_path / "saves"), "--output", str(output)]
    done = subprocess.run([*command, *places, *options], capture_output=True, text=True, timeout=110)
    assert output.exists(), done.stderr
    found = [json.loads(line) for line in output.read_text().splitlines()]
    return done.returncode, {row["row"]: row for row in found}


def test_rows_are_measured(tmp_path: Path) -> None:
    code, found = rows(tmp_path, "--writers", "restore,holdfast,torch_save", "--saves", "1")
    assert code == 0
    assert found["restore"]["load_gb_per_second"] > 0
    for name in ("holdfast", "torch_save"):
        assert found[name]["saves"] == 1 and found[name]["call_ms"] > 0


def test_a_row_is_stopped_at_its_limit_and_said_to_be_missing(tmp_path: Path) -> None:
    code, found = rows(tmp_path, "--writers", "torch_save,dcp_save", "--writer-seconds", "0.2")
    assert code == 1
    assert {row["missing"] for row in found.values()} == {"stopped after 0.2 s"}
