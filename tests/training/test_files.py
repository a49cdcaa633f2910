"""A file is replaced at once: a reader never sees a part of it."""

from __future__ import annotations

import json
import threading
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


def test_says_which_directory_it_cannot_list(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    (tmp_path / "node-0").mkdir()
    (tmp_path / "node-0" / "shard-0").symlink_to("shard-0")
    (tmp_path / "node-1" / "shard-0" / ".a.slot").mkdir(parents=True)
    (tmp_path / "keeper").touch()
    assert files.listing(tmp_path, "*/shard-*/*.slot") == [tmp_path / "node-1" / "shard-0" / ".a.slot"]
    (message,) = caplog.messages
    assert message.startswith(f"{tmp_path}/node-0/shard-0: cannot be listed (Too many levels of symbolic")


def test_lists_a_directory_that_another_process_is_removing(tmp_path: Path) -> None:
    shard = tmp_path / "node" / "shard-0"
    stop = threading.Event()

    def make_and_remove() -> None:
        while not stop.is_set():
            shard.mkdir(parents=True)
            shard.rmdir()
            shard.parent.rmdir()

    thread = threading.Thread(target=make_and_remove)
    thread.start()
    try:
        for _ in range(3000):  # Path.glob raises within the first few hundred
            assert set(files.listing(tmp_path, "*/shard-*")) <= {shard}
            assert set(files.listing(shard.parent, "shard-*")) <= {shard}
    finally:
        stop.set()
        thread.join()
