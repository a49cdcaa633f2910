"""Documents of a source: the same ones however the files are cut, and clear messages for bad files."""

from __future__ import annotations

import json
from pathlib import Path

import pyarrow as pa
import pyarrow.parquet as pq
import pytest
from hypothesis import given
from hypothesis import strategies as st

from training.errors import ConfigError, RunError
from training.preparation import corpus as corpus_module
from training.preparation.corpus import Corpus, Document, open_folder, open_stdlib


def documents(corpus: Corpus) -> list[Document]:
    return [doc for part in corpus.parts() for piece in part for doc in corpus.documents(piece)]


def texts(root: Path) -> list[str]:
    return [document.text for document in documents(open_folder(root, text_field="text"))]


def write_parquet(path: Path, values: list[str | None], *, field: str = "text") -> None:
    pq.write_table(pa.table({field: values}), path, row_group_size=2)


def test_reads_every_kind_in_order_of_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "notes.md").write_text("one")
    (tmp_path / "a.jsonl").write_text('{"text": "two"}\n{"text": "three"}')
    write_parquet(tmp_path / "c.parquet", ["four", "five", "six"])
    (tmp_path / "d.py").write_text("seven")
    (tmp_path / "ignored.bin").write_text("no")
    (tmp_path / ".hidden").mkdir()
    (tmp_path / ".hidden" / "x.txt").write_text("no")
    assert texts(tmp_path) == ["two", "three", "one", "four", "five", "six", "seven"]


def test_reasons_for_skipping(tmp_path: Path) -> None:
    (tmp_path / "empty.txt").write_text(" \n")
    (tmp_path / "latin.txt").write_bytes("é".encode("latin-1"))
    lines = ['{"text": "x"}', "not json", '{"text": 5}', '{"text": "\\ud800"}', "[1]", '{"text": ""}']
    (tmp_path / "z.jsonl").write_text("\n".join(lines))
    skips = [(doc.id, doc.skip) for doc in documents(open_folder(tmp_path, text_field="text"))]
    assert skips == [
        ("empty.txt", "empty"),
        ("latin.txt", "undecodable"),
        ("z.jsonl:0", ""),
        ("z.jsonl:14", "malformed"),
        ("z.jsonl:23", "malformed"),
        ("z.jsonl:35", "undecodable"),
        ("z.jsonl:54", "malformed"),
        ("z.jsonl:58", "empty"),
    ]


@given(lines=st.lists(st.text(max_size=12), max_size=20), limit=st.integers(1, 80))
def test_cuts_of_jsonl_lose_and_double_nothing(
    tmp_path_factory: pytest.TempPathFactory, lines: list[str], limit: int
) -> None:
    """GIVEN pieces that end anywhere, inside a line or at its end THEN the documents are the same."""
    root = tmp_path_factory.mktemp("corpus")
    data = "".join(json.dumps({"text": line}) + "\n" for line in ["first", *lines])
    (root / "a.jsonl").write_text(data)
    corpus = open_folder(root, text_field="text")
    whole = documents(corpus)
    pieces = [piece for file in corpus.files for piece in corpus_module._pieces(root, file, limit)]
    assert [document for piece in pieces for document in corpus.documents(piece)] == whole
    assert len(whole) == len(lines) + 1


def test_parts_are_about_equal_and_in_order(tmp_path: Path) -> None:
    for number in range(10):
        (tmp_path / f"{number}.txt").write_bytes(b"x" * (1 << 20))
    parts = open_folder(tmp_path, text_field="text").parts()
    assert [[piece.file[0] for piece in part] for part in parts] == [list("0123"), list("4567"), list("89")]


def test_fingerprint_follows_the_files(tmp_path: Path) -> None:
    (tmp_path / "a.txt").write_text("one")
    first = open_folder(tmp_path, text_field="text").fingerprint
    assert open_folder(tmp_path, text_field="text").fingerprint == first
    (tmp_path / "b.txt").write_text("two")
    assert open_folder(tmp_path, text_field="text").fingerprint != first


def test_empty_folder(tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prepare\.source='.*': holds no text: .* \.jsonl "):
        open_folder(tmp_path, text_field="text")


def test_wrong_text_field(tmp_path: Path) -> None:
    (tmp_path / "a.jsonl").write_text('{"content": "x", "id": 1}\n')
    with pytest.raises(ConfigError, match=r"text_field='text': .*a\.jsonl has the fields content, id"):
        open_folder(tmp_path, text_field="text")


def test_wrong_parquet_column(tmp_path: Path) -> None:
    write_parquet(tmp_path / "a.parquet", ["x"], field="body")
    with pytest.raises(ConfigError, match=r"text_field='text': .*a\.parquet has the fields body"):
        open_folder(tmp_path, text_field="text")


def test_file_that_is_no_parquet(tmp_path: Path) -> None:
    (tmp_path / "a.parquet").write_bytes(b"PAR1 but not really")
    with pytest.raises(RunError, match=r"a\.parquet: is no readable parquet file \(.*\); replace it"):
        open_folder(tmp_path, text_field="text")


def test_parquet_with_damaged_pages(tmp_path: Path) -> None:
    """GIVEN a file whose footer is fine and whose pages are not THEN reading stops with its name."""
    path = tmp_path / "a.parquet"
    write_parquet(path, [f"some text {number}" for number in range(1000)])
    data = bytearray(path.read_bytes())
    data[4:2000] = b"\xff" * 1996
    path.write_bytes(data)
    corpus = open_folder(tmp_path, text_field="text")
    with pytest.raises(RunError, match=r"a\.parquet: is no readable parquet file"):
        documents(corpus)


def test_standard_library(tmp_path: Path) -> None:
    corpus = open_stdlib()
    names = {file.file for file in corpus.files}
    assert {"json/decoder.py", "argparse.py"} <= names
    assert not any("site-packages" in name or "__pycache__" in name for name in names)
