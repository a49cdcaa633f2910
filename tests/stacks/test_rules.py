from __future__ import annotations

import re
from ipaddress import IPv4Network

from hypothesis import given
from hypothesis import strategies as st

from stacks import rules


@given(st.integers(min_value=-10_000, max_value=200_000))
def test_a_refused_capacity_comes_with_two_that_work(gib: int) -> None:
    problems = list(rules.lustre_capacity(gib))

    assert bool(problems) == (gib != 1200 and (gib <= 0 or gib % 2400 != 0))
    for problem in problems:
        for suggestion in re.findall(r"\d+", problem.fix):
            assert list(rules.lustre_capacity(int(suggestion))) == []


@given(st.integers(min_value=0, max_value=32), st.integers(min_value=0, max_value=2**32 - 1))
def test_whole_networks_are_networks_and_host_addresses_are_not(prefix: int, address: int) -> None:
    network = IPv4Network((address, prefix), strict=False)

    assert rules.is_network(str(network))
    is_whole = int(network.network_address) == address
    assert rules.is_network(f"{IPv4Network((address, 32)).network_address}/{prefix}") == is_whole


@given(st.text(max_size=20))
def test_any_text_is_judged_without_an_exception(text: str) -> None:
    list(rules.kubernetes_version(text, support="standard", applies=True))
    list(rules.public_cidr("public_cidrs[0]", text))
    list(rules.cidrs(text, text))
