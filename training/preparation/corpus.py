"""Where text comes from: the standard library, or a folder of text, jsonl and parquet files.

A corpus is a fixed list of pieces, each small enough for one process to read; what comes out does not
depend on how many processes read it. Every document has an id that depends on its place in the source
alone, so it falls into training or validation whatever else is in the folder.
"""

from __future__ import annotations

import json
import os
import sys
import sysconfig
from collections.abc import Iterator, Set
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

import xxhash

from training.errors import ConfigError, RunError

STDLIB = "python-stdlib"
_PROSE = frozenset([".txt", ".md", ".rst", ".tex", ".html"])
_CODE = frozenset(
    [".py", ".pyi", ".c", ".h", ".cc", ".cpp", ".hpp", ".cu", ".java", ".js", ".ts", ".go", ".rs", ".sh"]
)
SUFFIXES = _PROSE | _CODE | {".jsonl", ".parquet"}

_MINIMUM_PIECE_BYTES = 4 << 20
_MAXIMUM_PIECE_BYTES = 64 << 20
_PIECES = 256
_ROWS = 1024
_INSTALLED = {"site-packages", "dist-packages"}

Skip = Literal["", "empty", "undecodable", "malformed"]


@dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A part of a source file: a byte range of jsonl, a row group of parquet, else the whole file."""

    file: str
    size: int
    start: int = 0


@dataclass(frozen=True, kw_only=True, slots=True)
class Document:
    """One text, or the reason why it is left out."""

    id: str
    text: str = ""
    skip: Skip = ""


@dataclass(frozen=True, kw_only=True, slots=True)
class Corpus:
    """The files of a source."""

    root: Path
    description: str
    text_field: str
    files: tuple[Piece, ...]
    """Whole files with their sizes, sorted by name."""
    fingerprint: str
    """Changes when a file is added, removed or written."""

    @property
    def size(self) -> int:
        return sum(file.size for file in self.files)

    def parts(self) -> list[tuple[Piece, ...]]:
        """Group the pieces of all files into parts of about equal size, in order."""
        limit = min(max(self.size // _PIECES, _MINIMUM_PIECE_BYTES), _MAXIMUM_PIECE_BYTES)
        parts: list[tuple[Piece, ...]] = []
        group: list[Piece] = []
        for file in self.files:
            for piece in _pieces(self.root, file, limit):
                group.append(piece)
                if sum(member.size for member in group) >= limit:
                    parts.append(tuple(group))
                    group = []
        return [*parts, tuple(group)] if group else parts

    def documents(self, piece: Piece) -> Iterator[Document]:
        """Read the documents of a piece.

        Raises:
            RunError: The file cannot be read.
        """
        path = self.root / piece.file
        try:
            if path.suffix == ".jsonl":
                yield from _jsonl_documents(path, piece, self.text_field)
            elif path.suffix == ".parquet":
                yield from _parquet_documents(path, piece, self.text_field)
            else:
                yield _document(piece.file, path.read_bytes())
        except OSError as error:
            raise RunError(f"{path}: cannot be read ({error.strerror or error}); mend the file") from error


def open_folder(root: Path, *, text_field: str, description: str | None = None) -> Corpus:
    """List the files of a folder, hidden ones left out.

    Raises:
        ConfigError: There is no file to read, or the text field is not in them.
        RunError: A parquet file cannot be read.
    """
    return _corpus(root, sorted(_walk(root)), text_field, description or str(root))


def open_stdlib() -> Corpus:
    """List the sources of this Python's standard library."""
    root = Path(sysconfig.get_path("stdlib"))
    names = sorted(name for name in _walk(root, without=_INSTALLED) if name.endswith(".py"))
    version = ".".join(str(number) for number in sys.version_info[:3])
    return _corpus(root, names, "", f"sources of the Python {version} standard library")


def _corpus(root: Path, names: list[str], text_field: str, description: str) -> Corpus:
    digest = xxhash.xxh3_128()
    files = []
    for name in names:
        stat = (root / name).stat()
        digest.update(f"{name}\0{stat.st_size}\0{stat.st_mtime_ns}\n".encode(errors="surrogateescape"))
        files.append(Piece(file=name, size=stat.st_size))
        _check_text_field(root / name, text_field)
    if not any(file.size for file in files):
        rule = f"holds no text: looked for files that end in {' '.join(sorted(SUFFIXES))}"
        raise ConfigError.of("prepare.source", str(root), rule, "give another folder")
    return Corpus(
        root=root,
        description=description,
        text_field=text_field,
        files=tuple(files),
        fingerprint=digest.hexdigest(),
    )


def _walk(root: Path, without: Set[str] = frozenset()) -> Iterator[str]:
    for directory, subdirectories, names in os.walk(root):
        subdirectories[:] = [d for d in subdirectories if not d.startswith(".") and d not in without]
        for name in names:
            path = Path(directory, name)
            if path.suffix in SUFFIXES and not name.startswith(".") and path.is_file():
                yield path.relative_to(root).as_posix()


def _check_text_field(path: Path, text_field: str) -> None:
    """Look into the first record: a wrong field name would otherwise skip every document."""
    if path.suffix == ".jsonl":
        with path.open("rb") as file:
            record = _parse(file.readline())
        if isinstance(record, dict) and text_field not in record:
            raise _no_such_field(path, text_field, list(record))
    if path.suffix == ".parquet":
        names = _open_parquet(path).schema_arrow.names
        if text_field not in names:
            raise _no_such_field(path, text_field, names)


def _no_such_field(path: Path, text_field: str, fields: list[str]) -> ConfigError:
    rule = f"{path} has the fields {', '.join(fields) or '(none)'}"
    return ConfigError.of("prepare.text_field", text_field, rule, "name the one that holds the text")


def _pieces(root: Path, file: Piece, limit: int) -> Iterator[Piece]:
    if file.file.endswith(".jsonl"):
        for start in range(0, file.size, limit):
            yield Piece(file=file.file, start=start, size=min(limit, file.size - start))
    elif file.file.endswith(".parquet"):
        metadata = _open_parquet(root / file.file).metadata
        for group in range(metadata.num_row_groups):
            yield Piece(file=file.file, start=group, size=metadata.row_group(group).total_byte_size)
    else:
        yield file


def _jsonl_documents(path: Path, piece: Piece, text_field: str) -> Iterator[Document]:
    with path.open("rb") as file:
        if piece.start:
            file.seek(piece.start - 1)
            file.readline()  # a line belongs to the piece that holds its first byte
        while (start := file.tell()) < piece.start + piece.size and (line := file.readline()):
            yield _record_document(f"{piece.file}:{start}", _parse(line), text_field)


def _parse(line: bytes) -> Any:
    try:
        return json.loads(line)
    except ValueError:
        return None


def _record_document(identity: str, record: Any, text_field: str) -> Document:
    text = record.get(text_field) if isinstance(record, dict) else None
    if not isinstance(text, str):
        return Document(id=identity, skip="malformed")
    try:
        text.encode()
    except UnicodeEncodeError:  # half of a surrogate pair, as an escape
        return Document(id=identity, skip="undecodable")
    return _text_document(identity, text)


def _open_parquet(path: Path) -> Any:
    try:
        import pyarrow.parquet
    except ImportError as error:
        rule, fix = "parquet files need the pyarrow package", "pip install pyarrow"
        raise ConfigError.of("prepare.source", str(path), rule, fix) from error
    try:
        return pyarrow.parquet.ParquetFile(path)
    except (ValueError, OSError) as error:
        raise _damaged_parquet(path, error) from error


def _parquet_documents(path: Path, piece: Piece, text_field: str) -> Iterator[Document]:
    file, row = _open_parquet(path), 0
    try:
        for batch in file.iter_batches(_ROWS, row_groups=[piece.start], columns=[text_field]):
            for text in batch.column(0).to_pylist():
                yield _record_document(f"{piece.file}:{piece.start}:{row}", {text_field: text}, text_field)
                row += 1
    except (ValueError, OSError) as error:
        raise _damaged_parquet(path, error) from error


def _damaged_parquet(path: Path, error: Exception) -> RunError:
    reason = str(error).splitlines()[0]
    return RunError(f"{path}: is no readable parquet file ({reason}); replace it or remove it")


def _document(identity: str, data: bytes) -> Document:
    try:
        return _text_document(identity, data.decode())
    except UnicodeDecodeError:
        return Document(id=identity, skip="undecodable")


def _text_document(identity: str, text: str) -> Document:
    if not text.strip():
        return Document(id=identity, skip="empty")
    return Document(id=identity, text=text)
