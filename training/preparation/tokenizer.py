"""Text to token ids: bytes, a byte-level BPE trained on the corpus, or a model's own tokenizer."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Protocol

import numpy as np
import xxhash
from numpy.typing import NDArray

from training.config import PrepareConfig
from training.errors import ConfigError
from training.preparation.corpus import Corpus, Document
from training.preparation.hub import download_tokenizer, is_hub_name
from training.preparation.progress import Progress

BYTE = "byte"
BPE = "bpe"

_BYTE_EOS = 256
_EOS_TOKEN = "<|eos|>"
_TRAINING_BYTES = 256 << 20  # the merges hardly change beyond, and the trainer holds its words in memory


@dataclass(frozen=True, kw_only=True, slots=True)
class TokenizerInfo:
    """What the index says about a tokenizer, and what a process needs to load it."""

    name: str
    directory: Path | None
    """Holds tokenizer.json; None for bytes."""
    vocabulary_tokens: int
    eos_id: int
    sha256: str


class TextTokenizer(Protocol):
    """Encodes documents."""

    def encode(self, texts: list[str]) -> list[NDArray[np.integer[Any]]]: ...


class ByteTokenizer:
    """A token is a byte of UTF-8."""

    def encode(self, texts: list[str]) -> list[NDArray[np.integer[Any]]]:
        return [np.frombuffer(text.encode(), dtype=np.uint8) for text in texts]


class LibraryTokenizer:
    """A tokenizer.json, run by the tokenizers library."""

    def __init__(self, directory: Path) -> None:
        self._tokenizer = _load(directory / "tokenizer.json")

    def encode(self, texts: list[str]) -> list[NDArray[np.integer[Any]]]:
        encodings = self._tokenizer.encode_batch_fast(texts, add_special_tokens=False)
        return [np.array(encoding.ids, dtype=np.uint32) for encoding in encodings]


def open_tokenizer(info: TokenizerInfo) -> TextTokenizer:
    """Load the tokenizer in the process that uses it."""
    return LibraryTokenizer(info.directory) if info.directory else ByteTokenizer()


def make_tokenizer(
    config: PrepareConfig, corpus: Corpus, directory: Path, progress: Progress
) -> TokenizerInfo:
    """Train, copy or download the tokenizer into `directory`, unless that was done before.

    Raises:
        ConfigError: The model has no tokenizer that the tokenizers library reads.
    """
    if config.tokenizer == BYTE:
        return TokenizerInfo(
            name=BYTE, directory=None, vocabulary_tokens=_BYTE_EOS + 1, eos_id=_BYTE_EOS, sha256=""
        )
    if not directory.exists():
        _make_directory(config, corpus, directory, progress)
    return _describe(config.tokenizer, directory)


def _make_directory(config: PrepareConfig, corpus: Corpus, directory: Path, progress: Progress) -> None:
    temporary = directory.with_name(directory.name + ".tmp")
    shutil.rmtree(temporary, ignore_errors=True)
    temporary.mkdir(parents=True)
    if config.tokenizer == BPE:
        _train(corpus, config.vocabulary_tokens, temporary, progress)
    elif Path(config.tokenizer).is_dir():
        _copy(Path(config.tokenizer), temporary)
    elif is_hub_name(config.tokenizer):
        download_tokenizer(config.tokenizer, temporary)
    else:
        rule, fix = "is no directory", "give byte, bpe, or the directory or hub name of a model"
        raise ConfigError.of("prepare.tokenizer", config.tokenizer, rule, fix)
    os.replace(temporary, directory)


def _describe(name: str, directory: Path) -> TokenizerInfo:
    file = directory / "tokenizer.json"
    vocabulary = _load(file).get_vocab(with_added_tokens=True)
    eos = _eos_token(directory)
    if eos not in vocabulary:
        rule = f"says no end-of-document token of its vocabulary (eos_token={eos!r})"
        fix = "set eos_token in its tokenizer_config.json"
        raise ConfigError.of("prepare.tokenizer", name, rule, fix)
    return TokenizerInfo(
        name=name,
        directory=directory,
        vocabulary_tokens=max(vocabulary.values()) + 1,
        eos_id=vocabulary[eos],
        sha256=hashlib.sha256(file.read_bytes()).hexdigest(),
    )


def _eos_token(directory: Path) -> str | None:
    for name in ("tokenizer_config.json", "special_tokens_map.json"):
        file = directory / name
        token = json.loads(file.read_bytes()).get("eos_token") if file.is_file() else None
        if token:
            return str(token["content"] if isinstance(token, dict) else token)
    return None


def _copy(source: Path, target: Path) -> None:
    if not (source / "tokenizer.json").is_file():
        rule = "the directory holds no tokenizer.json"
        fix = "make one with transformers: AutoTokenizer.from_pretrained(DIR).save_pretrained(DIR)"
        raise ConfigError.of("prepare.tokenizer", str(source), rule, fix)
    for name in ("tokenizer.json", "tokenizer_config.json", "special_tokens_map.json"):
        if (source / name).is_file():
            shutil.copyfile(source / name, target / name)


def _train(corpus: Corpus, vocabulary_tokens: int, target: Path, progress: Progress) -> None:
    tokenizers = _library(BPE)
    tokenizer = tokenizers.Tokenizer(tokenizers.models.BPE())
    tokenizer.pre_tokenizer = tokenizers.pre_tokenizers.ByteLevel(add_prefix_space=False)
    tokenizer.decoder = tokenizers.decoders.ByteLevel()
    trainer = tokenizers.trainers.BpeTrainer(
        vocab_size=vocabulary_tokens,
        special_tokens=[_EOS_TOKEN],
        initial_alphabet=tokenizers.pre_tokenizers.ByteLevel.alphabet(),  # so every byte round-trips
        show_progress=False,
    )
    tokenizer.train_from_iterator(_training_texts(corpus, progress), trainer)
    progress.finish()
    tokenizer.save(str(target / "tokenizer.json"))
    settings = {"tokenizer_class": "PreTrainedTokenizerFast", "eos_token": _EOS_TOKEN}
    (target / "tokenizer_config.json").write_text(json.dumps(settings, indent=1) + "\n")


def _training_texts(corpus: Corpus, progress: Progress) -> Iterator[str]:
    """Yield the documents whose hash falls into the share that fits the trainer."""
    share = min(1.0, _TRAINING_BYTES / max(corpus.size, 1))
    progress.start("train tokenizer", corpus.size)
    for part in corpus.parts():
        for piece in part:
            yield from _sample(corpus.documents(piece), share)
            progress.advance(piece.size)


def _sample(documents: Iterable[Document], share: float) -> Iterator[str]:
    for document in documents:
        if not document.skip and falls_into(document.id, share, salt=1):
            yield document.text


def falls_into(identity: str, share: float, *, salt: int = 0) -> bool:
    """Say whether a document belongs to a random but fixed `share` of all documents."""
    digest = xxhash.xxh3_64_intdigest(identity.encode(errors="surrogateescape"), seed=salt)
    return digest < share * 2.0**64


def _load(file: Path) -> Any:
    tokenizers = _library(str(file))
    try:
        return tokenizers.Tokenizer.from_file(str(file))
    except Exception as error:  # the library raises bare Exception
        rule = f"the tokenizers library cannot read it ({error})"
        raise ConfigError.of("prepare.tokenizer", str(file), rule, "replace the file") from error


def _library(name: str) -> Any:
    try:
        import tokenizers
    except ImportError as error:
        rule, fix = "needs the tokenizers package", "pip install tokenizers, or use tokenizer = 'byte'"
        raise ConfigError.of("prepare.tokenizer", name, rule, fix) from error
    return tokenizers


def single_threaded() -> None:
    """Keep the tokenizers library from starting a thread a core in every process."""
    os.environ["TOKENIZERS_PARALLELISM"] = "false"
    os.environ["RAYON_NUM_THREADS"] = "1"
