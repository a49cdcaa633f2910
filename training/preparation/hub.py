"""Download from the Hugging Face hub: a data set as jsonl files, the files of a tokenizer.

Its client libraries are imported here and nowhere else, and only when a hub name is used.
"""

from __future__ import annotations

import itertools
import json
import os
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from training.errors import ConfigError, RunError
from training.preparation.progress import Progress

_DOCUMENTS_A_FILE = 10_000
# Neither OSError nor ValueError; HTTPError is that of whichever HTTP library the client's version uses.
_CLIENT_ERRORS = ("HTTPError", "EntryNotFoundError", "RevisionResolutionError", "XetDownloadError")
_TOKENIZER_FILES = ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json")


def is_hub_name(name: str) -> bool:
    """Say whether `name` has the form NAME or OWNER/NAME."""
    return re.fullmatch(r"[\w-][\w.-]*(/[\w-][\w.-]*)?", name) is not None


def download_documents(
    name: str, target: Path, *, subset: str, text_field: str, maximum: int, progress: Progress
) -> None:
    """Stream the train split of a hub data set into `target`; files that are there are kept.

    Raises:
        ConfigError: The datasets package is not installed, or the records lack the text field.
        RunError: The hub or the data set cannot be reached.
    """
    target.mkdir(parents=True, exist_ok=True)
    done = len(list(target.glob("*.jsonl"))) * _DOCUMENTS_A_FILE
    progress.start("download", maximum)
    progress.advance(min(done, maximum) if maximum else done)
    records = _records(name, subset, skip=done)
    if maximum:
        records = itertools.islice(records, max(0, maximum - done))
    while chunk := list(itertools.islice(records, _DOCUMENTS_A_FILE)):
        _check_field(name, chunk[0], text_field)
        _write(target / f"{done:012d}.jsonl", chunk, text_field)
        done += len(chunk)
        progress.advance(len(chunk))
    progress.finish()


def download_tokenizer(name: str, target: Path) -> None:
    """Fetch the tokenizer files of a hub model into `target`.

    Raises:
        RunError: The hub cannot be reached, or holds no fast tokenizer under that name.
    """
    hub = _import("huggingface_hub", "prepare.tokenizer", name)
    for file in _TOKENIZER_FILES:
        try:
            path = hub.hf_hub_download(name, file)
        except hub.errors.EntryNotFoundError as error:
            if file == _TOKENIZER_FILES[0]:
                raise _unreachable("prepare.tokenizer", name, error) from error
            continue
        except _fetch_errors() as error:
            raise _unreachable("prepare.tokenizer", name, error) from error
        (target / file).write_bytes(Path(path).read_bytes())


def _records(name: str, subset: str, *, skip: int) -> Iterator[dict[str, Any]]:
    datasets = _import("datasets", "prepare.source", name)
    try:
        stream = datasets.load_dataset(name, subset or None, split="train", streaming=True)
        yield from stream.skip(skip)
    except _fetch_errors() as error:
        raise _unreachable("prepare.source", name, error) from error


def _import(package: str, setting: str, name: str) -> Any:
    try:
        return __import__(package)
    except ImportError as error:
        rule = f"is no folder here, and names of the hub need the {package} package"
        raise ConfigError.of(setting, name, rule, f"mend the path, or pip install {package}") from error


def _fetch_errors() -> tuple[type[Exception], ...]:
    """Return what says "no network", "no such name" or "no such subset"; anything else is a bug."""
    from huggingface_hub import errors

    named = [getattr(errors, name) for name in _CLIENT_ERRORS if hasattr(errors, name)]
    return (OSError, ValueError, *named)


def _unreachable(setting: str, name: str, error: Exception) -> RunError:
    reason = (str(error).splitlines() or [""])[0] or type(error).__name__
    fix = "mend the name or the network; without network, give a folder that was downloaded elsewhere"
    return RunError(f"{setting}={name!r}: cannot be fetched from the hub ({reason}); {fix}")


def _check_field(name: str, record: dict[str, Any], text_field: str) -> None:
    if text_field not in record:
        rule = f"data set {name} has the fields {', '.join(record)}"
        raise ConfigError.of("prepare.text_field", text_field, rule, "name the one that holds the text")


def _write(path: Path, records: list[dict[str, Any]], text_field: str) -> None:
    temporary = path.with_suffix(".tmp")
    with temporary.open("w", encoding="ascii") as file:
        for record in records:
            file.write(json.dumps({text_field: record[text_field]}) + "\n")
    os.replace(temporary, path)
