"""Source -> tokenizer -> parts -> equal shards, each stage kept if the run is killed."""

from __future__ import annotations

from collections import Counter
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from training.config import PrepareConfig
from training.errors import ConfigError
from training.preparation.corpus import STDLIB, Corpus, open_folder, open_stdlib
from training.preparation.hub import download_documents, is_hub_name
from training.preparation.merge import ShardMerger, merged_parts
from training.preparation.output import OutputDirectory
from training.preparation.parts import SPLITS, PartResult, Tokenisation, tokenise
from training.preparation.progress import Progress
from training.preparation.tokenizer import TokenizerInfo, make_tokenizer
from training.shards import SHARD_TOKENS, VERSION, Shard, ShardIndex, dtype_for

_EXAMPLES = 10


@dataclass(frozen=True, kw_only=True, slots=True)
class Report:
    """What lies in the output directory."""

    source: str
    tokenizer: str
    vocabulary_tokens: int
    documents: dict[str, int]
    tokens: dict[str, int]
    shards: dict[str, int]
    text_bytes: int
    skipped: dict[str, int]
    skipped_examples: list[str]


def prepare(
    config: PrepareConfig,
    output: Path,
    *,
    workers: int,
    progress: Progress,
    force: bool = False,
    shard_tokens: int = SHARD_TOKENS,
) -> Report:
    """Make the shards that `config` asks for in `output`, or return at once if they are there.

    Args:
        config: Source, tokenizer and split.
        output: Directory for `train/`, `validation/` and `tokenizer/`.
        workers: Processes that tokenise.
        progress: Shows how far it is.
        force: Throw away what another request left in `output`.
        shard_tokens: Tokens a shard.

    Raises:
        ConfigError: The request is wrong, or `output` belongs to another one.
        RunError: A source cannot be read, or another process writes to `output`.
    """
    request = _request(config, shard_tokens)
    directory = OutputDirectory(output)
    with directory.locked():
        directory.claim(request, force=force)
        known = directory.read_report()
        return Report(**known) if known else _make(config, directory, workers, shard_tokens, progress)


def _request(config: PrepareConfig, shard_tokens: int) -> dict[str, Any]:
    corpus = _local_corpus(config)
    files = corpus.fingerprint if corpus else ""
    return {"version": VERSION, "shard_tokens": shard_tokens, "files": files, **asdict(config)}


def _local_corpus(config: PrepareConfig) -> Corpus | None:
    """List the files of the source; None for a hub data set."""
    if config.source == STDLIB:
        return open_stdlib()
    if Path(config.source).is_dir():
        return open_folder(Path(config.source), text_field=config.text_field)
    if is_hub_name(config.source):
        return None
    fix = f"give {STDLIB}, a folder, or the name of a hub data set"
    raise ConfigError.of("prepare.source", config.source, "is no folder", fix)


def _hub_corpus(config: PrepareConfig, download: Path, progress: Progress) -> Corpus:
    download_documents(
        config.source,
        download,
        subset=config.subset,
        text_field=config.text_field,
        maximum=config.maximum_samples,
        progress=progress,
    )
    description = " ".join(filter(None, [config.source, config.subset]))
    return open_folder(download, text_field=config.text_field, description=description)


def _make(
    config: PrepareConfig,
    directory: OutputDirectory,
    workers: int,
    shard_tokens: int,
    progress: Progress,
) -> Report:
    corpus = _local_corpus(config) or _hub_corpus(config, directory.download, progress)
    task = Tokenisation(
        corpus=corpus,
        tokenizer=make_tokenizer(config, corpus, directory.tokenizer, progress),
        validation_fraction=config.validation_fraction,
        directory=directory.parts,
    )
    mergers = {
        split: ShardMerger(task, split, directory.path / split, shard_tokens=shard_tokens) for split in SPLITS
    }
    parts = corpus.parts()
    merged = merged_parts(task, mergers, len(parts))
    results = tokenise(task, parts, merged, workers=workers, progress=progress)
    _check_not_empty(config, results)
    shards = {split: merger.merge(results, progress) for split, merger in mergers.items()}
    indexes = {split: _index(task, split, results, shards[split], shard_tokens) for split in SPLITS}
    report = _report(indexes, results)
    directory.finish(indexes, asdict(report))
    return report


def _check_not_empty(config: PrepareConfig, results: list[PartResult]) -> None:
    if not any(result.splits["train"].tokens for result in results):
        rule = "has no document for the training shards: all are empty, unreadable or fell to validation"
        fix = "give more text, or lower prepare.validation_fraction"
        raise ConfigError.of("prepare.source", config.source, rule, fix)


def _index(
    task: Tokenisation,
    split: str,
    results: list[PartResult],
    shards: tuple[Shard, ...],
    shard_tokens: int,
) -> ShardIndex:
    tokenizer: TokenizerInfo = task.tokenizer
    files = [result.splits[split] for result in results]
    return ShardIndex(
        version=VERSION,
        dtype=dtype_for(tokenizer.vocabulary_tokens),
        vocabulary_tokens=tokenizer.vocabulary_tokens,
        eos_id=tokenizer.eos_id,
        tokenizer=tokenizer.name,
        tokenizer_sha256=tokenizer.sha256,
        source=task.corpus.description,
        documents=sum(file.documents for file in files),
        tokens=sum(file.tokens for file in files),
        shard_tokens=shard_tokens,
        shards=shards,
    )


def _report(indexes: dict[str, ShardIndex], results: list[PartResult]) -> Report:
    train = indexes["train"]
    skipped: Counter[str] = Counter()
    for result in results:
        skipped.update(result.skipped)
    return Report(
        source=train.source,
        tokenizer=train.tokenizer,
        vocabulary_tokens=train.vocabulary_tokens,
        documents={split: index.documents for split, index in indexes.items()},
        tokens={split: index.tokens for split, index in indexes.items()},
        shards={split: len(index.shards) for split, index in indexes.items()},
        text_bytes=sum(result.text_bytes for result in results),
        skipped=dict(sorted(skipped.items())),
        skipped_examples=[example for result in results for example in result.examples][:_EXAMPLES],
    )
