"""A file is replaced at once: a reader never sees a part of it."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from training import files


def test_replaces_and_leaves_nothing_else(tmp_path: Path) -> None:
    path = tmp_path / "value.json"
    files.write_json(path, {"a": 1})
    files.write_json(path, {"a": 2})
    assert json.loads(path.read_text()) == {"a": 2}
    assert [entry.name for entry in tmp_path.iterdir()] == ["value.json"]


def test_the_old_file_stays_where_the_new_one_cannot_be_written(tmp_path: Path) -> None:
    path = tmp_path / "text"
    files.write_text(path, "old")
    with pytest.raises(UnicodeEncodeError):
        files.write_text(path, "\ud800")
    assert path.read_text() == "old"
