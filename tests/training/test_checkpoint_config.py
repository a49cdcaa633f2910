"""Rules of the settings of the state's tiers."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.tiny import tiny_recipe
from training.errors import ConfigError


@pytest.mark.parametrize(
    ("fields", "message"),
    [
        ({"directory": "local"}, "checkpoint.local.directory='local': must be an absolute path"),
        ({"directory": "/local", "keep": 1}, "checkpoint.local.keep=1"),
        ({"directory": "/local", "every_step": 1}, "did you mean 'every_steps'"),
    ],
)
def test_wrong_local_settings_are_named(tmp_path: Path, fields: dict[str, Any], message: str) -> None:
    with pytest.raises(ConfigError, match=message.replace("(", r"\(")):
        tiny_recipe(tmp_path, checkpoint={"writer": "holdfast", "local": fields})


def test_local_copies_need_snapshots(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r'needs checkpoint.writer = "holdfast"'):
        tiny_recipe(tmp_path, checkpoint={"writer": "dcp_sync", "local": {"directory": "/local"}})
