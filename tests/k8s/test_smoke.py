from __future__ import annotations

import json
from typing import Any

import kubernetes_validate
import pytest

from k8s.findings import Finding
from k8s.smoke import MARK, judge, smoke_objects
from tests.k8s.conftest import MakeRun
from training.nvrx_version import KNOWN_VERSIONS

EFA = "NCCL INFO NET/OFI Selected provider is efa, fabric is efa-direct (found 32 nics)"


def log(efa: str = EFA, **result: Any) -> str:
    good = {
        "ranks": 16,
        "bus_gigabytes_per_second": 380.0,
        "torch": "2.13.0",
        "nccl": "2.29.7",
        "nvrx": "0.6.0",
        "glibc": "2.34",
    }
    return f"node: {efa}\n{json.dumps({MARK: {**good, **result}})}\n"


def levels(findings: list[Finding]) -> dict[str, str]:
    return {finding.name: finding.level for finding in findings}


def test_a_sound_cluster(make: MakeRun) -> None:
    assert levels(list(judge(log(), make()))) == {"mount": "OK", "bandwidth": "OK", "image": "OK"}


@pytest.mark.parametrize(
    ("text", "name", "level"),
    [
        (log(efa="NCCL INFO Using network Socket"), "efa", "FAIL"),
        (log(bus_gigabytes_per_second=10.0), "bandwidth", "FAIL"),
        (log(bus_gigabytes_per_second=150.0), "bandwidth", "WARN"),
        (log(nccl="2.28.5"), "image", "FAIL"),
        (log(nvrx=""), "image", "FAIL"),
        (log(nvrx="0.5.0"), "image", "FAIL"),
        *((log(nvrx=known), "image", "OK") for known in KNOWN_VERSIONS),
        ("Traceback", "smoke", "FAIL"),
    ],
)
def test_judges_what_rank_0_has_printed(make: MakeRun, text: str, name: str, level: str) -> None:
    assert levels(list(judge(text, make())))[name] == level


def test_pods_are_those_of_training_without_spares(make: MakeRun) -> None:
    run = make(spares=1, job={"spares": 1})
    *_, job = smoke_objects(run)
    kubernetes_validate.validate(job, "1.36", strict=True)
    assert job["spec"]["completions"] == 2
    command = job["spec"]["template"]["spec"]["containers"][0]["command"]
    name = job["metadata"]["name"]
    assert f"--master-addr={name}-0.{name}" in command
    assert "--node-rank=$(HOLDFAST_NODE_INDEX)" in command
