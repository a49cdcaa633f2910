"""The table of bench/recovery."""

from __future__ import annotations

from typing import Any

import pytest

from bench.recovery import main, misses, table
from training.errors import EXIT_CONFIG

ROWS: list[dict[str, Any]] = [
    {
        "system": "Holdfast",
        "fault": "worker",
        "seconds": 2.0,
        "steps_lost": 0,
        "phases": {"detect": 0.5, "stop": 0.001, "first step": 1.5},
    },
    {"system": "torchrun", "fault": "worker", "seconds": 9.0},
    {"system": "NVRx ft_launcher", "fault": "worker", "seconds": None},
]


def test_table_has_ratios_and_phases() -> None:
    lines = table(ROWS).splitlines()
    assert lines[2] == "| worker | Holdfast | 2.00 | 1.0 | 0 | detect 0.50, first step 1.50 |"
    assert lines[3] == "| worker | torchrun | 9.00 | 4.5 | - |  |"
    assert lines[4] == "| worker | NVRx ft_launcher | none in 120 s | - | - |  |"


@pytest.mark.parametrize(
    ("fault", "seconds", "passed", "is_missed"),
    [
        ("worker", 2.9, True, False),
        ("worker", 3.1, True, True),
        ("worker", None, False, True),
        ("worker", 2.9, False, True),
        ("control store", 40.0, True, False),
        ("control store", None, False, True),
    ],
)
def test_bars_are_missed(fault: str, seconds: float | None, passed: bool, is_missed: bool) -> None:
    row = {"system": "Holdfast", "fault": fault, "seconds": seconds, "passed": passed}
    assert misses(row) is is_missed
    assert not misses({**row, "system": "torchrun"})


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--faults", "worker,launchr"], "--faults='launchr': unknown; did you mean 'launcher'?"),
        (["--peers", "torchrunn"], "--peers='torchrunn': unknown; did you mean 'torchrun'?"),
        (["--recipe", "none.toml"], "RECIPE='none.toml': cannot be read"),
        (["--directory", "none"], "--directory='none': is no directory; make it"),
        (["--output", "none/rows.jsonl"], "--output='none/rows.jsonl': lies in no directory"),
    ],
)
def test_wrong_options_are_refused_before_anything_is_measured(
    arguments: list[str], message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(arguments) == EXIT_CONFIG
    assert message in capsys.readouterr().err
