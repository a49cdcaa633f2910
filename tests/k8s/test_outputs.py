from __future__ import annotations

import json
from pathlib import Path

import pytest

from k8s.examples import SAMPLE_OUTPUTS
from k8s.outputs import load_outputs, minor_version, parse_outputs
from training.errors import ConfigError


def sample() -> dict[str, dict[str, str]]:
    return json.loads(SAMPLE_OUTPUTS.read_text())  # type: ignore[no-any-return]


def test_merges_the_outputs_of_all_stacks() -> None:
    outputs = load_outputs(SAMPLE_OUTPUTS)
    assert outputs.region == "us-west-2"
    assert outputs.file_system_capacity_gib == 1200
    assert minor_version(outputs.kubernetes_version) == 36


def test_an_end_of_capacity_is_a_time() -> None:
    stacks = sample()
    stacks["HoldfastCluster"]["CapacityEnd"] = "tomorrow"
    with pytest.raises(
        ConfigError, match=r"outputs\.CapacityEnd='tomorrow': must be like 2026-12-09T11:30:00Z"
    ):
        parse_outputs(stacks)


def test_leaves_exports_of_cdk_aside() -> None:
    stacks = sample()
    stacks["HoldfastCluster"]["ExportsOutputRefVpc1234"] = "vpc-1"
    assert parse_outputs(stacks) == load_outputs(SAMPLE_OUTPUTS)


def test_names_every_wrong_value_at_once() -> None:
    stacks = sample()
    del stacks["HoldfastCluster"]["Namespace"]
    stacks["HoldfastCluster"]["Nodes"] = "two"
    stacks["HoldfastCluster"]["KubernetesVersion"] = "latest"
    stacks["HoldfastNetwork"]["ClusterName"] = "other"
    with pytest.raises(ConfigError) as caught:
        parse_outputs(stacks)
    message = str(caught.value)
    assert "outputs.Namespace: is missing" in message
    assert "outputs.Nodes='two': must be a whole number" in message
    assert "outputs.KubernetesVersion='latest': must be like 1.36" in message
    assert "HoldfastCluster.ClusterName='holdfast': differs from the 'other' of another stack" in message


@pytest.mark.parametrize("text", ["{", "[]", '{"Stack": 1}'])
def test_refuses_other_files(tmp_path: Path, text: str) -> None:
    path = tmp_path / "outputs.json"
    path.write_text(text)
    with pytest.raises(ConfigError, match="--outputs"):
        load_outputs(path)


def test_refuses_a_missing_file(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match="cannot be read"):
        load_outputs(tmp_path / "none.json")
