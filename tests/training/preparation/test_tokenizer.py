"""Tokenizers: what goes in comes out, the same file every time, and clear messages for bad ones."""

from __future__ import annotations

import io
import json
from pathlib import Path

import pytest
import tokenizers

from training.config import PrepareConfig
from training.errors import ConfigError
from training.preparation.corpus import Corpus, open_folder
from training.preparation.progress import Progress
from training.preparation.tokenizer import TokenizerInfo, falls_into, make_tokenizer, open_tokenizer

TEXTS = ["def f(x):\n    return x\n", "Ünïcödé — 漢字 🙂\x00", "a" * 100]


@pytest.fixture
def corpus(tmp_path: Path) -> Corpus:
    root = tmp_path / "corpus"
    root.mkdir()
    for number in range(20):
        (root / f"{number}.txt").write_text(f"word{number % 7} and the other words " * 50)
    return open_folder(root, text_field="text")


def make(corpus: Corpus, directory: Path, **settings: object) -> TokenizerInfo:
    config = PrepareConfig(**settings)  # type: ignore[arg-type]
    return make_tokenizer(config, corpus, directory, Progress(io.StringIO()))


def test_bytes(corpus: Corpus, tmp_path: Path) -> None:
    info = make(corpus, tmp_path / "t", tokenizer="byte")
    assert (info.vocabulary_tokens, info.eos_id) == (257, 256)
    decoded = [bytes(ids.tolist()).decode() for ids in open_tokenizer(info).encode(TEXTS)]
    assert decoded == TEXTS
    assert not (tmp_path / "t").exists()


def test_bpe_round_trips_text_it_never_saw(corpus: Corpus, tmp_path: Path) -> None:
    info = make(corpus, tmp_path / "t", tokenizer="bpe", vocabulary_tokens=300)
    assert info.eos_id == 0
    assert 257 <= info.vocabulary_tokens <= 300
    library = tokenizers.Tokenizer.from_file(str(tmp_path / "t" / "tokenizer.json"))
    ids = open_tokenizer(info).encode(TEXTS)
    assert [library.decode(row.tolist()) for row in ids] == TEXTS
    assert max(int(row.max()) for row in ids) < info.vocabulary_tokens


def test_bpe_training_gives_the_same_file(corpus: Corpus, tmp_path: Path) -> None:
    """GIVEN prepare was killed while it trained THEN training anew makes the same tokenizer."""
    shas = {make(corpus, tmp_path / f"t{n}", tokenizer="bpe", vocabulary_tokens=400).sha256 for n in range(4)}
    assert len(shas) == 1


def test_trained_tokenizer_is_kept(corpus: Corpus, tmp_path: Path) -> None:
    first = make(corpus, tmp_path / "t", tokenizer="bpe", vocabulary_tokens=300)
    modified = (tmp_path / "t" / "tokenizer.json").stat().st_mtime_ns
    assert make(corpus, tmp_path / "t", tokenizer="bpe", vocabulary_tokens=300) == first
    assert (tmp_path / "t" / "tokenizer.json").stat().st_mtime_ns == modified


@pytest.fixture
def model_dir(corpus: Corpus, tmp_path: Path) -> Path:
    make(corpus, tmp_path / "model", tokenizer="bpe", vocabulary_tokens=300)
    return tmp_path / "model"


def test_tokenizer_of_a_model(corpus: Corpus, model_dir: Path, tmp_path: Path) -> None:
    settings = {"eos_token": {"content": "<|eos|>", "lstrip": False}}
    (model_dir / "tokenizer_config.json").write_text(json.dumps(settings))
    info = make(corpus, tmp_path / "t", tokenizer=str(model_dir))
    assert info.eos_id == 0
    assert (tmp_path / "t" / "tokenizer.json").read_bytes() == (model_dir / "tokenizer.json").read_bytes()


def test_model_without_end_token(corpus: Corpus, model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "tokenizer_config.json").unlink()
    with pytest.raises(ConfigError, match=r"says no end-of-document token .*eos_token=None.*; set eos_token"):
        make(corpus, tmp_path / "t", tokenizer=str(model_dir))


def test_model_without_tokenizer_json(corpus: Corpus, tmp_path: Path) -> None:
    (tmp_path / "model").mkdir()
    with pytest.raises(ConfigError, match=r"the directory holds no tokenizer\.json; make one with"):
        make(corpus, tmp_path / "t", tokenizer=str(tmp_path / "model"))


def test_damaged_tokenizer_json(corpus: Corpus, model_dir: Path, tmp_path: Path) -> None:
    (model_dir / "tokenizer.json").write_text("{")
    with pytest.raises(ConfigError, match=r"tokenizer\.json': the tokenizers library cannot read it"):
        make(corpus, tmp_path / "t", tokenizer=str(model_dir))


def test_path_that_does_not_exist(corpus: Corpus, tmp_path: Path) -> None:
    with pytest.raises(ConfigError, match=r"prepare\.tokenizer='.*/none': is no directory"):
        make(corpus, tmp_path / "t", tokenizer=str(tmp_path / "none"))


def test_shares_are_fixed_and_fair() -> None:
    chosen = [falls_into(f"{number}.txt", 0.25) for number in range(4000)]
    assert 900 < sum(chosen) < 1100
    assert chosen == [falls_into(f"{number}.txt", 0.25) for number in range(4000)]
    assert not any(falls_into(f"{number}", 0.0) for number in range(100))
    assert all(falls_into(f"{number}", 1.0) for number in range(100))
