from __future__ import annotations

import pytest

from k8s.text_table import duration, table


def test_columns_are_as_wide_as_their_widest_cell() -> None:
    assert list(table(("A", "B"), [("long", "1"), ("x", "")])) == ["A     B", "long  1", "x"]


@pytest.mark.parametrize(
    ("seconds", "text"),
    [(5, "5 s"), (65, "1 min 5 s"), (3660, "1 h 1 min"), (90000, "1 d 1 h")],
)
def test_duration(seconds: float, text: str) -> None:
    assert duration(seconds) == text
