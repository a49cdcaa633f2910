"""What the training state's tiers cost the training loop, all writers side by side in one run.

    python -m bench.checkpoint_stall --output stall.jsonl                          8 GB of state, one GPU
    python -m bench.checkpoint_stall --device cpu --width 64 --layers 2 --vocabulary 512 --length 64

Rows: a snapshot at every step, a restore from memory, then one for each writer. Each is measured in a
process of its own that is killed at its deadline; what it had measured until then stays. `--directory`
decides what the writers are compared on: a slow disk hides all differences but those of the call itself.
"""

from __future__ import annotations

import argparse
import gc
import importlib
import json
import multiprocessing
import os
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

# asked in another way, the number of GPUs would open a context here, and no fork could use one
os.environ.setdefault("PYTORCH_NVML_BASED_CUDA_CHECK", "1")

import torch

from bench.stall import measure
from bench.stall.loop import Loop, Shape
from bench.stall.methods import METHODS
from training import environment, model, warm
from training.config import ModelConfig

# the first of them makes the slots, for all
TIERS = ("restore", "snapshot_every_step")
_PROBE_BYTES = 256 << 20

Row = dict[str, Any]


def main(argv: Sequence[str] | None = None) -> int:
    """Measure; return 1 if a row is missing."""
    arguments = _parse(argv)
    shape = _shape(arguments)
    _import_all()
    deadline = time.monotonic() + arguments.budget_seconds
    rows: list[Row] = []
    with _directory(arguments.directory) as root, _directory(environment.shared_memory()) as memory:
        os.environ[environment.SHARED_MEMORY] = str(memory)
        place = {"directory": str(arguments.directory), "torch": torch.__version__, **_speed(root)}
        print(json.dumps(place))  # noqa: T201
        for name in arguments.writers.split(","):
            seconds = round(min(arguments.writer_seconds, deadline - time.monotonic()), 1)
            rows.append(_measured(name, shape, root, arguments, seconds))
            _record({**rows[-1], **place}, arguments.output)
    print(table(rows))  # noqa: T201
    return 0 if all("missing" not in row for row in rows) else 1


def table(rows: Sequence[Mapping[str, Any]]) -> str:
    """Return the writers' rows as a Markdown table."""
    columns = {
        "writer": "row",
        "training stands still, ms": "call_ms",
        "cost, ms": "cost_per_save_ms",
        "cost, steps": "cost_in_steps",
        "durable after, s": "durable_seconds",
        "first save: stands still, ms": "first_call_ms",
        "": "missing",
    }
    lines = ["| " + " | ".join(columns) + " |", "|" + "---|" * len(columns)]
    lines += [
        "| " + " | ".join(_cell(row.get(key, "")) for key in columns.values()) + " |"
        for row in rows
        if row["row"] not in TIERS
    ]
    return "\n".join(lines)


def _cell(value: Any) -> str:
    return f"{value:.2f}" if isinstance(value, float) else str(value)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--device", choices=("cuda", "cpu"), default="cuda")
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--layers", type=int, default=8)
    parser.add_argument("--vocabulary", type=int, default=32000)
    parser.add_argument("--length", type=int, default=2048)
    parser.add_argument("--batch", type=int, default=8)
    parser.add_argument("--steps", type=int, default=12, help="steps a window, each with one save")
    parser.add_argument("--saves", type=int, default=2, help="windows a writer, after its first save")
    parser.add_argument("--writers", default=",".join((*TIERS, *METHODS)), help="comma-separated")
    parser.add_argument("--writer-seconds", type=float, default=45.0, help="limit of each row")
    parser.add_argument("--budget-seconds", type=float, default=240.0, help="limit of all rows together")
    parser.add_argument("--directory", type=Path, default=Path("runs/bench"), help="where saves go")
    parser.add_argument(
        "--output", type=Path, help="append JSON lines to this file, each as soon as measured"
    )
    arguments = parser.parse_args(argv)
    unknown = set(arguments.writers.split(",")) - {*TIERS, *METHODS}
    if unknown:
        parser.error(f"--writers={sorted(unknown)[0]}: unknown; use some of {', '.join((*TIERS, *METHODS))}")
    return arguments


def _shape(arguments: argparse.Namespace) -> Shape:
    return Shape(
        device=arguments.device,
        width=arguments.width,
        layers=arguments.layers,
        vocabulary=arguments.vocabulary,
        length=arguments.length,
        batch=arguments.batch,
    )


def _import_all() -> None:
    """Import here what every row needs: their processes are forked from this one."""
    for name in warm.MODULES:
        importlib.import_module(name)
    fields = {"model_type": "llama", "hidden_size": 64, "num_hidden_layers": 1, "vocab_size": 64}
    model.build_model(model.load_model_config(ModelConfig(config=fields)))
    gc.freeze()
    assert not torch.cuda.is_initialized()


def _measured(name: str, shape: Shape, root: Path, arguments: argparse.Namespace, seconds: float) -> Row:
    """Measure a row in a process of its own; what is known at the deadline counts."""
    if name in METHODS and METHODS[name].needs_gpu and shape.device != "cuda":
        return {"row": name, "missing": "needs a GPU"}
    row: Row = {"row": name, "missing": f"not measured within {max(seconds, 0):g} s"}
    if seconds <= 0:
        return row
    context = multiprocessing.get_context("fork")
    receiver, sender = context.Pipe(duplex=False)
    directory = root / name
    directory.mkdir()
    process = context.Process(target=_child, args=(sender, name, shape, directory, arguments))
    started = time.monotonic()
    process.start()
    sender.close()
    problem = f"stopped after {seconds:g} s"
    try:
        while receiver.poll(max(0.0, started + seconds - time.monotonic())):
            row = receiver.recv()
        # poll() is false at the deadline only: an end is an EOF
    except EOFError:
        process.join()
        problem = f"exit code {process.exitcode}" if process.exitcode else ""
    finally:
        _end(process)
        shutil.rmtree(directory, ignore_errors=True)
    return row | {"wall_seconds": time.monotonic() - started} | ({"missing": problem} if problem else {})


def _child(sender: Connection, name: str, shape: Shape, root: Path, arguments: argparse.Namespace) -> None:
    os.setsid()
    loop = Loop(shape)
    with model.no_packed_sequence_check():
        if name == "snapshot_every_step":
            measure.snapshots(loop, root, sender.send, steps=arguments.steps)
        elif name == "restore":
            measure.restore(loop, root, sender.send, steps=arguments.steps)
        else:
            measure.saves(name, loop, root, sender.send, steps=arguments.steps, count=arguments.saves)
    torch.distributed.destroy_process_group()


def _end(process: Any) -> None:
    """Kill what is left of a row: its process and the workers of its writer."""
    process.kill()
    with suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)
    process.join()


def _speed(root: Path) -> dict[str, Any]:
    """Return what the directory lies on, and how fast one stream is written and synced there."""
    data = os.urandom(1 << 20) * (_PROBE_BYTES >> 20)
    path = root / "probe"
    start = time.perf_counter()
    with path.open("wb") as file:
        file.write(data)
        file.flush()
        os.fsync(file.fileno())
    seconds = time.perf_counter() - start
    path.unlink()
    kind = subprocess.run(["stat", "-f", "-c", "%T", root], capture_output=True, text=True, check=True)
    return {"file_system": kind.stdout.strip(), "write_gb_per_second": len(data) / 1e9 / seconds}


@contextmanager
def _directory(parent: Path) -> Iterator[Path]:
    parent.mkdir(parents=True, exist_ok=True)
    with tempfile.TemporaryDirectory(dir=parent, ignore_cleanup_errors=True) as directory:
        yield Path(directory)


def _record(row: Row, output: Path | None) -> None:
    if output is not None:
        with output.open("a") as file:
            file.write(json.dumps(row) + "\n")
    print(json.dumps(row, default=str))  # noqa: T201
    sys.stdout.flush()


if __name__ == "__main__":
    sys.exit(main())
