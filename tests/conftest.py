from __future__ import annotations

import os
import tempfile
from collections.abc import Iterator
from pathlib import Path

import pytest
from hypothesis import settings

from tests.tiny import tiny_data
from training import environment

# the default fails a test for being slow, which a busy machine makes it
settings.register_profile("no timing asserts", deadline=None)
settings.load_profile("no timing asserts")


@pytest.fixture(scope="session", autouse=True)
def shared_memory() -> Iterator[Path]:
    """A directory of its own in /dev/shm: tests kill ranks, and what these leave must not stay."""
    with tempfile.TemporaryDirectory(dir="/dev/shm", prefix="holdfast-tests-") as directory:
        os.environ[environment.SHARED_MEMORY] = directory
        yield Path(directory)
        del os.environ[environment.SHARED_MEMORY]


@pytest.fixture(scope="session")
def data(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Token shards of a tiny corpus."""
    return tiny_data(tmp_path_factory.mktemp("data") / "tokens")
