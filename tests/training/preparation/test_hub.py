"""The hub: its client is optional, and no network is a message, not a traceback."""

from __future__ import annotations

import json
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


def test_data_set_is_streamed_and_resumed(tmp_path: Path) -> None:
    """GIVEN a killed download THEN it goes on after the files it has, and ends in the same bytes."""
    pytest.importorskip("datasets", reason="optional: reads data sets of the hub")
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
