"""The fork server's preparation."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.tiny import tiny_recipe
from training import warm, worker
from training.errors import ConfigError
from training.shards import TokenStore

CODE = """
import gc, sys
from pathlib import Path
from training import warm
from training.config import load_recipe
gc.freeze()  # Python 3.12 starts with frozen objects
warm.preload(load_recipe(Path(sys.argv[1])))
assert "training.worker" in sys.modules
"""


def test_objects_that_are_frozen_already_do_not_stop_it() -> None:
    recipe = "training/recipes/rehearsal_cpu.toml"
    done = subprocess.run([sys.executable, "-c", CODE, recipe], capture_output=True, text=True, timeout=100)
    assert done.returncode == 0, done.stderr


def test_ranks_find_the_data_open(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "tokens")
    config = tiny_recipe(tmp_path / "tokens", ranks=1)
    warm._open_data(config)
    expected = TokenStore(tmp_path / "tokens" / "train")
    # WHEN a look at the shards would fail THEN nobody looks
    (tmp_path / "tokens" / "train" / expected.index.shards[0].file).unlink()
    store, _ = worker.open_stores(config)
    assert store.index == expected.index


def test_data_that_was_prepared_anew_is_opened_anew(data: Path, tmp_path: Path) -> None:
    shutil.copytree(data, tmp_path / "tokens")
    config = tiny_recipe(tmp_path / "tokens", ranks=1)
    warm._open_data(config)
    index = tmp_path / "tokens" / "train" / "index.json"
    index.write_text(index.read_text().replace('"documents": ', '"documents": 9'))
    store, _ = worker.open_stores(config)
    assert store.index == TokenStore(tmp_path / "tokens" / "train").index


def test_data_that_cannot_be_opened_is_left_to_the_ranks(tmp_path: Path) -> None:
    config = tiny_recipe(tmp_path / "none", ranks=1)
    warm._open_data(config)
    with pytest.raises(ConfigError, match=r"data\.path"):
        worker.open_stores(config)
