"""`training checkpoint ls | verify | explain | prune RUN_DIR [--json]`: a run's saved states.

ls       every state, in storage and in this machine's memory
verify   read and hash every checkpoint; exit code 1 if one is damaged
explain  what a restart would restore now, and why nothing newer; loads nothing
prune    remove half-written checkpoints, those of states that the run has left, and those older than the
         newest --keep that are whole; refused while the run is going on
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

from training import commit, inventory, local_image, slots
from training.errors import EXIT_DONE, EXIT_RETRY, CheckpointError, ConfigError
from training.inventory import Source
from training.lineage import Ancestry, read_ancestry
from training.run_directory import RunDirectory, read_local_directory, read_run_id
from training.slots import Descriptor, Mark

Row = dict[str, Any]


def main(argv: Sequence[str]) -> int:
    """Run `training checkpoint`."""
    parser = argparse.ArgumentParser(prog="training checkpoint", description=__doc__.split("\n")[0])
    parser.add_argument("action", choices=sorted(_ACTIONS))
    parser.add_argument("run_dir", type=Path, help="directory of a run, such as runs/NAME")
    parser.add_argument("--keep", type=int, default=3, help="prune: whole checkpoints to keep (default: 3)")
    parser.add_argument("--json", action="store_true", help="print JSON")
    arguments = parser.parse_args(argv)
    if not (arguments.run_dir / "run.json").exists():
        fix = "give the directory of a run, such as runs/NAME"
        raise ConfigError.of("RUN_DIR", str(arguments.run_dir), "holds no run", fix)
    if arguments.keep < 2:
        raise ConfigError.of("--keep", arguments.keep, "must be at least 2", "the newest may be the bad one")
    rows, code = _ACTIONS[arguments.action](arguments)
    sys.stdout.write((json.dumps(rows, indent=1) if arguments.json else _table(rows)) + "\n")
    return code


def _ls(arguments: argparse.Namespace) -> tuple[list[Row], int]:
    return [_row(source) for source in _sources(arguments.run_dir)], EXIT_DONE


def _verify(arguments: argparse.Namespace) -> tuple[list[Row], int]:
    rows: list[Row] = []
    for path in commit.committed_checkpoints(arguments.run_dir / "checkpoints"):
        try:
            manifest = commit.verify(path)
        except CheckpointError as error:
            rows.append({"step": commit.step_of(path), "verdict": "DAMAGED", "detail": str(error)})
            continue
        size = sum(entry.size_bytes for entry in manifest.files.values())
        detail = f"{len(manifest.files)} files, {size / 2**30:.3f} GiB"
        rows.append({"step": manifest.step, "verdict": "whole", "detail": detail})
    damaged = any(row["verdict"] == "DAMAGED" for row in rows)
    return rows, EXIT_RETRY if damaged else EXIT_DONE


def _explain(arguments: argparse.Namespace) -> tuple[list[Row], int]:
    sources = _sources(arguments.run_dir)
    usable = inventory.newest_first(sources)
    chosen = usable[0] if usable else None
    rows = [{**_row(source), "verdict": _verdict(source, chosen)} for source in sources]
    if chosen is None:
        rows.append({"step": 0, "tier": "-", "verdict": "a restart begins at step 0"})
    return rows, EXIT_DONE


def _prune(arguments: argparse.Namespace) -> tuple[list[Row], int]:
    RunDirectory(path=arguments.run_dir).lock(wait_seconds=0.0)
    root = arguments.run_dir / "checkpoints"
    rows: list[Row] = []
    ancestry = read_ancestry(arguments.run_dir)
    kept = whole = 0
    for source in inventory.newest_first(inventory.durable_sources(root, ancestry)):
        if whole == arguments.keep:
            break
        kept += 1
        assert source.path is not None
        try:
            commit.verify(source.path)
            whole += 1
        except CheckpointError as error:
            rows.append({"damaged": str(source.path), "detail": str(error)})
    if not whole:  # what the run has left may be all that can be read: that is for a person to decide
        return rows, EXIT_RETRY if rows else EXIT_DONE
    gone = commit.prune(root, keep=kept, ancestry=ancestry)
    return [*rows, *({"removed": str(path)} for path in gone)], EXIT_DONE


def _sources(run_dir: Path) -> list[Source]:
    """Return all states, newest first; memory is this machine's alone."""
    ancestry, run = read_ancestry(run_dir), read_run_id(run_dir)
    in_memory = [(descriptor, mark) for _, descriptor, mark in slots.scan(run)]
    found = [
        *inventory.shard_sources(_by_shard(in_memory), ancestry),
        *_local_sources(run_dir, run, ancestry),
        *inventory.durable_sources(run_dir / "checkpoints", ancestry),
    ]
    return sorted(found, key=inventory.order)


def _local_sources(run_dir: Path, run: str, ancestry: Ancestry) -> list[Source]:
    root = read_local_directory(run_dir)
    if root is None:
        return []
    images = [(manifest.descriptor, manifest.mark) for _, manifest in local_image.scan(root, run)]
    return inventory.shard_sources(_by_shard(images), ancestry, tier="local")


def _by_shard(held: Sequence[tuple[Descriptor, Mark | None]]) -> list[list[Mark]]:
    """Return what is held of each shard, over all nodes that this machine stands for."""
    shards = max((descriptor.shards for descriptor, _ in held), default=0)
    marks: list[set[Mark]] = [set() for _ in range(shards)]
    for descriptor, mark in held:
        if mark is not None:
            marks[descriptor.shard].add(mark)
    return [sorted(found, key=lambda mark: mark.step) for found in marks]


def _row(source: Source) -> Row:
    return {
        "step": source.step,
        "tier": source.tier,
        "lineage": source.lineage,
        "state": source.refusal or "usable",
        "path": str(source.path or ""),
    }


def _verdict(source: Source, chosen: Source | None) -> str:
    if source is chosen:
        return "RESTORED by a restart" + ("" if source.path is None else ", if its files verify")
    return "refused" if source.refusal else "older, or slower to load"


def _table(rows: Sequence[Mapping[str, Any]]) -> str:
    if not rows:
        return "nothing"
    names = list(dict.fromkeys(name for row in rows for name in row))
    cells = [names, *([str(row.get(name, "")) for name in names] for row in rows)]
    widths = [max(len(row[column]) for row in cells) for column in range(len(names))]
    lines = ["  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)) for row in cells]
    return "\n".join(line.rstrip() for line in lines)


_ACTIONS: dict[str, Callable[[argparse.Namespace], tuple[list[Row], int]]] = {
    "ls": _ls,
    "verify": _verify,
    "explain": _explain,
    "prune": _prune,
}
