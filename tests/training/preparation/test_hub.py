"""The hub: its client is optional, and no network is a message, not a traceback."""

from __future__ import annotations

import functools
import json
import sys
from pathlib import Path
from typing import Any

import huggingface_hub
import pytest

from training.environment import free_port
from training.errors import ConfigError, RunError
from training.preparation.hub import download_documents, download_tokenizer, is_hub_name
from training.preparation.progress import Progress


@pytest.mark.parametrize(
    ("name", "expected"),
    [
        ("allenai/c4", True),
        ("imdb", True),
        ("/data/books", False),
        ("./books", False),
        ("a/b/c", False),
        ("", False),
    ],
)
def test_names(name: str, expected: bool) -> None:
    assert is_hub_name(name) is expected


def test_data_set_without_the_package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "datasets", None)
    with pytest.raises(ConfigError, match=r"prepare\.source='boks': .* need the datasets package; mend the"):
        download_documents(
            "boks", tmp_path, subset="", text_field="text", maximum=0, progress=Progress(sys.stderr)
        )


def test_tokenizer_without_network(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("huggingface_hub.constants.HF_HUB_OFFLINE", True)
    monkeypatch.setenv("HF_HOME", str(tmp_path / "home"))
    with pytest.raises(
        RunError, match=r"tokenizer='owner/none': cannot be fetched .*; without network, give"
    ):
        download_tokenizer("owner/none", tmp_path)


def test_tokenizer_from_a_hub_that_refuses_connections(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:

    download = functools.partial(
        huggingface_hub.hf_hub_download,
        endpoint=f"http://127.0.0.1:{free_port()}",
        cache_dir=tmp_path / "cache",
    )
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(RunError, match=r"tokenizer='owner/none': cannot be fetched"):
        download_tokenizer("owner/none", tmp_path)


def refuse_to_connect(*arguments: Any, **options: Any) -> None:
    raise huggingface_hub.errors.RevisionResolutionError("connection refused")


def make_a_mistake(*arguments: Any, **options: Any) -> None:
    raise TypeError("a bug")


@pytest.mark.parametrize(("download", "seen"), [(refuse_to_connect, RunError), (make_a_mistake, TypeError)])
def test_only_errors_of_the_client_are_the_hubs(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, download: Any, seen: type[Exception]
) -> None:
    monkeypatch.setattr(huggingface_hub, "hf_hub_download", download)
    with pytest.raises(seen):
        download_tokenizer("owner/none", tmp_path)


def test_data_set_is_streamed_and_resumed(tmp_path: Path) -> None:
    """GIVEN a killed download THEN it goes on after the files it has, and ends in the same bytes."""
    lines = [json.dumps({"text": f"text {number}", "url": "u"}) for number in range(12_000)]
    (tmp_path / "set").mkdir()
    (tmp_path / "set" / "train.jsonl").write_text("\n".join(lines))

    def download(target: Path) -> dict[str, bytes]:
        settings = {"subset": "", "text_field": "text", "progress": Progress(sys.stderr)}
        download_documents(str(tmp_path / "set"), target, maximum=11_000, **settings)  # type: ignore[arg-type]
        return {path.name: path.read_bytes() for path in target.iterdir()}

    files = download(tmp_path / "out")
    assert {name: data.count(b"\n") for name, data in files.items()} == {
        "000000000000.jsonl": 10_000,
        "000000010000.jsonl": 1_000,
    }
    (tmp_path / "out" / "000000010000.jsonl").unlink()
    assert download(tmp_path / "out") == files
