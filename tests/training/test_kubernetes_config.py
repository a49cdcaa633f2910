from __future__ import annotations

from typing import Any

import pytest

from training import schema
from training.errors import ConfigError
from training.kubernetes_config import KubernetesConfig


@pytest.mark.parametrize(
    "fields",
    [
        {"queue": "team-a", "image_pull_secret": "mirror.example", "token_secret": ""},
        {"image_registry": "registry.example:5000/a/b-c/", "hugepages_mib": 5120},
    ],
)
def test_takes_what_kubernetes_takes(fields: dict[str, Any]) -> None:
    loaded = schema.load(KubernetesConfig, fields)
    assert {name: getattr(loaded, name) for name in fields} == fields


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"queue": "Team A"}, "queue='Team A': must be the name of a LocalQueue"),
        ({"queue": "a" * 64}, "must be the name of a LocalQueue"),  # it becomes a label's value
        ({"token_secret": "hf_token"}, "token_secret='hf_token': must be the name of a Kubernetes object"),
        ({"image_pull_secret": "-a"}, "must be the name of a Kubernetes object"),
        ({"image_registry": "https://registry.example"}, "must be HOST[:PORT][/PREFIX], without a scheme"),
        ({"hugepages_mib": 5121}, "hugepages_mib=5121: must be a multiple of 2"),
    ],
)
def test_refuses_what_the_api_server_would(fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError) as refused:
        schema.load(KubernetesConfig, fields)
    assert message in str(refused.value)
