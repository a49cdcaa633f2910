"""Twenty deaths of a real rank under a real launcher: nothing of them may pile up in what outlives them."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from tests.training.process_use import use_of
from tests.training.stores import until
from training import environment
from training.errors import EXIT_STOPPED
from training.events import read_events
from training.processes import adopt_orphans, descendants, reap_orphans

ROOT = Path(__file__).parents[2]
RESTARTS = 20
# After this many, all that is made once has been made.
SETTLED = 5
GROWTH_KIB = 8 * 1024
RECIPE = """
version = 1
[job]
name = "restarts"
[model.config]
model_type = "llama"
hidden_size = 32
intermediate_size = 64
num_hidden_layers = 1
num_attention_heads = 2
num_key_value_heads = 2
vocab_size = 128
max_position_embeddings = 64
[data]
path = "{data}"
sequence_length_tokens = 32
global_batch_samples = 4
[training]
steps = 1000000
device = "cpu"
[optimizer]
learning_rate = 1e-3
warmup_steps = 2
[checkpoint]
every_steps = 1000000
[snapshot]
every_steps = 1
[recovery]
layers = "in_job"
"""


def rounds(run_dir: Path) -> list[dict[str, Any]]:
    return [event for event in read_events(run_dir) if event["event"] == "round"]


def steps_in_round(run_dir: Path, number: int) -> bool:
    time.sleep(0.2)  # reading takes its time from the rank
    return any(e["event"] == "step" and e["round"] == number for e in read_events(run_dir))


def below_us() -> set[int]:
    reap_orphans()
    return set(descendants(os.getpid()))


def names(directory: Path) -> set[str]:
    """Return the files below a directory, without numbers, which change."""
    paths = (str(path.relative_to(directory)) for path in directory.rglob("*"))
    return {"".join(letter for letter in path if not letter.isdigit()) for path in paths}


@pytest.mark.timeout(400)
def test_twenty_restarts_leave_memory_threads_descriptors_and_files_flat(
    tmp_path: Path, data: Path, shared_memory: Path
) -> None:
    recipe, run_dir, temporary = tmp_path / "recipe.toml", tmp_path / "run", tmp_path / "tmp"
    recipe.write_text(RECIPE.format(data=data))
    temporary.mkdir()
    adopt_orphans()
    before = below_us()
    command = [sys.executable, "-m", "training", "launch", str(recipe), "--run-dir", str(run_dir)]
    environ = {**os.environ, "TMPDIR": str(temporary), environment.RUN_ID: "restarts"}
    node = subprocess.Popen(command, cwd=ROOT, env=environ)
    uses, files = [], []
    try:
        for number in range(RESTARTS + 1):
            assert until(partial(steps_in_round, run_dir, number), seconds=100)
            [worker] = rounds(run_dir)[-1]["workers"].values()
            below = set(descendants(worker)) | {worker}
            # what lives as long as the node: launch, control, launcher, fork servers, rank monitor
            lasting = [pid for pid in (node.pid, *descendants(node.pid)) if pid not in below]
            uses.append({pid: use_of(pid) for pid in lasting})
            files.append(names(shared_memory) | names(temporary))
            if number < RESTARTS:
                os.kill(worker, signal.SIGKILL)
        node.send_signal(signal.SIGTERM)
        assert node.wait(60) == EXIT_STOPPED
    finally:
        if node.poll() is None:
            node.terminate()
            node.wait(60)
    early, late = uses[SETTLED], uses[-1]
    assert early.keys() == late.keys()
    for pid, use in early.items():
        assert late[pid].threads <= use.threads
        assert late[pid].descriptors <= use.descriptors
        assert late[pid].memory_kib <= use.memory_kib + GROWTH_KIB
    assert files[-1] == files[SETTLED]
    assert until(lambda: below_us() <= before)
