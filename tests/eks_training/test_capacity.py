from __future__ import annotations

import pytest

from eks_training.capacity import Capacity


@pytest.mark.parametrize(
    ("mode", "own_group"), [("on-demand", True), ("reservation", False), ("capacity-block", False)]
)
def test_only_on_demand_nodes_get_an_own_placement_group(mode: str, own_group: bool) -> None:
    capacity = Capacity(mode=mode)  # type: ignore[arg-type]

    assert capacity.wants_own_placement_group is own_group


def test_on_demand_targets_nothing() -> None:
    capacity = Capacity()

    assert capacity.reservation is None
    assert capacity.market_options is None
