from __future__ import annotations

import json

from k8s.findings import Finding, as_json, as_table, at_least, exit_code, fail, ok, warn

ALL = [ok("zone", "a"), warn("image", "b", "wait"), fail("quota", "c", "ask")]


def test_exit_code_is_that_of_the_worst() -> None:
    assert [exit_code(ALL[:n]) for n in range(4)] == [0, 0, 1, 2]


def test_table_shows_each_fix_below_its_finding() -> None:
    assert as_table(ALL).splitlines() == [
        "      CHECK  FOUND",
        "OK    zone   a",
        "WARN  image  b",
        "      fix: wait",
        "FAIL  quota  c",
        "      fix: ask",
    ]


def test_json_holds_all_fields() -> None:
    assert [Finding(**entry) for entry in json.loads(as_json(ALL))] == ALL


def test_comparison_with_a_need() -> None:
    assert at_least("n", "nodes", have=2, need=2, fix="more") == ok("n", "nodes: 2, needed 2")
    assert at_least("n", "nodes", have=1, need=2, fix="more") == fail("n", "nodes: 1, needed 2", "more")
