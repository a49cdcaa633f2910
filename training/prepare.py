"""Turn text into token shards: `python -m training prepare`.

    python -m training prepare                                  # the Python standard library, as bytes
    python -m training prepare --source books/ --tokenizer bpe
    python -m training prepare training/recipes/llama3_8b_p5.toml

Killed at any point, the same command goes on where it was and ends in the same bytes, whatever the
number of processes.
"""

from __future__ import annotations

import argparse
import dataclasses
import json
import os
import re
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from training import schema
from training.config import JobConfig, PrepareConfig, load_recipe
from training.errors import EXIT_DONE, ConfigError
from training.preparation.pipeline import Report, prepare
from training.preparation.progress import Progress

_DATA = Path("runs/data")


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command and return its exit code."""
    options = _parser().parse_args(arguments)
    recipe = load_recipe(options.recipe) if options.recipe else None
    config = _config(options, recipe)
    output = options.output or (Path(recipe.data.path) if recipe else _default_output(config))
    workers = len(os.sched_getaffinity(0)) if options.workers is None else options.workers
    if workers < 1:
        raise ConfigError.of("--workers", workers, "must be at least 1", "change it")
    report = prepare(config, output, workers=workers, force=options.force, progress=Progress(sys.stderr))
    print(_as_json(report, output) if options.json else _as_table(report, output))  # noqa: T201
    return EXIT_DONE


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(prog="python -m training prepare", description=__doc__)
    parser.formatter_class = argparse.RawDescriptionHelpFormatter
    parser.add_argument("recipe", nargs="?", type=Path, help="take settings and data.path from it")
    parser.add_argument("--output", type=Path, help=f"directory of the shards (default {_DATA}/SOURCE)")
    parser.add_argument("--workers", type=int, help="processes (default: the CPUs of this process)")
    parser.add_argument("--force", action="store_true", help="replace shards made with other settings")
    parser.add_argument("--json", action="store_true", help="print the report as JSON")
    docs = schema.field_docs(PrepareConfig)
    settings = parser.add_argument_group("settings", "override the recipe's section [prepare]")
    for field in dataclasses.fields(PrepareConfig):
        settings.add_argument(
            f"--{field.name.replace('_', '-')}",
            type=type(field.default),
            metavar=type(field.default).__name__.upper(),
            help=f"{docs[field.name]} (default {field.default!r})".replace("%", "%%"),
        )
    return parser


def _config(options: argparse.Namespace, recipe: JobConfig | None) -> PrepareConfig:
    values: dict[str, Any] = dataclasses.asdict(recipe.prepare if recipe else PrepareConfig())
    for name in values:
        given = getattr(options, name)
        values[name] = values[name] if given is None else given
    return schema.load(PrepareConfig, values, path="prepare")


def _default_output(config: PrepareConfig) -> Path:
    parts = [config.source, config.subset, "" if config.tokenizer == "byte" else config.tokenizer]
    name = "-".join(re.sub(r"[^A-Za-z0-9]+", "-", part).strip("-") for part in parts if part)
    return _DATA / (name or "data")


def _as_json(report: Report, output: Path) -> str:
    return json.dumps({"output": str(output), **dataclasses.asdict(report)}, indent=1)


def _as_table(report: Report, output: Path) -> str:
    rows = [
        ("source", report.source),
        ("tokenizer", f"{report.tokenizer}, {report.vocabulary_tokens:,} tokens"),
        ("text", f"{report.text_bytes / 1e6:,.1f} MB"),
    ]
    for split, tokens in report.tokens.items():
        documents, shards = report.documents[split], report.shards[split]
        rows.append((split, f"{tokens:,} tokens of {documents:,} documents in {shards:,} shards"))
    skipped = ", ".join(f"{count:,} {reason}" for reason, count in report.skipped.items())
    rows.append(("skipped", skipped or "none"))
    rows += [("", f"  {example}") for example in report.skipped_examples]
    rows.append(("output", str(output)))
    return "\n".join(f"{name:<10} {value}" for name, value in rows)
