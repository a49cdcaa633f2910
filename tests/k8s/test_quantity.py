from __future__ import annotations

import pytest

from k8s.quantity import parse_quantity


@pytest.mark.parametrize(
    ("text", "value"),
    [
        ("8", 8),
        ("191450m", 191.45),
        ("1800Gi", 1800 * 2**30),
        ("127462076Ki", 127462076 * 1024),
        ("5k", 5000),
    ],
)
def test_reads_quantities(text: str, value: float) -> None:
    assert parse_quantity(text) == pytest.approx(value)


@pytest.mark.parametrize("text", ["", "Gi", "5Qi", "many"])
def test_refuses_others(text: str) -> None:
    with pytest.raises(ValueError, match="is no Kubernetes quantity"):
        parse_quantity(text)
