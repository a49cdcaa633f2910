"""The hub: its client is optional, and no network is a message, not a traceback."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

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
