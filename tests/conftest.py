from __future__ import annotations

from pathlib import Path

import pytest

from tests.tiny import tiny_data


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a tiny corpus."""
    return tiny_data(tmp_path_factory.mktemp("data") / "tokens")
