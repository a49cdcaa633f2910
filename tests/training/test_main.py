"""What a person sees who types something wrong: one message, exit code 64, no traceback."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[2]


def training(*arguments: str) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "training", *arguments]
    return subprocess.run(command, cwd=ROOT, capture_output=True, text=True, check=False)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ((), ""),
        (("rehears",), "COMMAND='rehears': unknown; did you mean 'rehearse'?"),
        (("goodput",), "the following arguments are required"),
        (("goodput", "none", "--jsn"), "unrecognized arguments: --jsn"),
        (("run", "none.toml"), "RECIPE='none.toml': cannot be read"),
        (("launch", "none.toml"), "RECIPE='none.toml': cannot be read"),
        (("rehearse", "README.md"), "RECIPE='README.md': is not TOML"),
        (("export", "none", "--output", "out"), "RUN_DIR='none': is no run directory"),
    ],
)
def test_mistakes_end_with_64_and_one_message(arguments: tuple[str, ...], message: str) -> None:
    done = training(*arguments)
    assert done.returncode == 64, done.stderr
    assert message in done.stderr + done.stdout
    assert "Traceback" not in done.stderr


@pytest.mark.parametrize(("rank", "line"), [("3", "rank 3 WARNING careful"), ("", " WARNING careful")])
def test_a_rank_says_in_its_log_which_it_is(rank: str, line: str) -> None:
    program = (
        "import logging; from training.__main__ import main; main(['--help']); logging.warning('careful')"
    )
    environ = {**os.environ, "RANK": rank}
    done = subprocess.run(
        [sys.executable, "-c", program], cwd=ROOT, env=environ, capture_output=True, text=True, check=True
    )
    assert line in done.stderr
    assert ("rank" in done.stderr) is bool(rank)


def test_help_lists_the_commands() -> None:
    done = training("--help")
    assert done.returncode == 0
    assert "rehearse" in done.stdout
