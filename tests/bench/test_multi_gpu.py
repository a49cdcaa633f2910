"""The benchmark of several GPUs, as far as two CPU ranks can run it."""

from __future__ import annotations

import os
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any
from xml.etree import ElementTree

import pytest

from bench.multi_gpu import plan, plot, recipes, table
from bench.multi_gpu.__main__ import main
from bench.multi_gpu.recipes import Workload
from bench.multi_gpu.results import Results, newest, read_rows
from bench.multi_gpu.runs import Settings, seconds_per_step
from bench.multi_gpu.training_speed import SpeedCase, flops_per_token
from k8s.model_size import parameter_count
from training import model as models
from training import schema, throughput
from training.config import JobConfig
from training.errors import EXIT_CONFIG

ROOT = Path(__file__).parents[2]
MACHINE = {"gpus": 2, "gpu": "a GPU", "driver": "1", "cores": 2, "numa_nodes": 1, "torch": "2", "nccl": "2"}


def load(workload: Workload, **tables: Any) -> JobConfig:
    found = recipes.recipe(
        workload, name="x", data=Path("d"), nodes=1, ranks_per_node=2, device="cuda", **tables
    )
    return schema.load(JobConfig, found)


@pytest.mark.parametrize("name", [name for name in recipes.MODELS if name != "tiny"])
def test_recipes_are_valid_and_survive_being_written(name: str, tmp_path: Path) -> None:
    workload = Workload(model=name, sequence_length_tokens=8192, samples_per_rank=4)
    tables = recipes.recipe(
        workload,
        name="x",
        data=Path("d"),
        nodes=1,
        ranks_per_node=2,
        device="cuda",
        rehearsal={"faults": [{"kind": "sigkill", "rank": 1, "step": 3}]},
    )
    written = tomllib.loads(recipes.write(tmp_path / "r.toml", tables).read_text())
    assert schema.load(JobConfig, written) == schema.load(JobConfig, tables)
    assert written["rehearsal"]["faults"] == [{"kind": "sigkill", "rank": 1, "step": 3}]


def test_flops_are_those_of_the_trainer() -> None:
    workload = Workload(model="tiny", sequence_length_tokens=32, samples_per_rank=1)
    config = load(workload)
    found = models.load_model_config(config.model)
    task = models.LanguageModelTask(models.build_model(found), loss_chunk_tokens=8)
    _, counted = models.parameter_counts(task)
    expected = throughput.flops_per_token(found, counted, 32)
    assert flops_per_token(workload, parameter_count(config)) == expected


def test_faults_of_the_plan_fit_their_recipes() -> None:
    settings = Settings(directory=Path("r"), data=Path("d"), device="cuda", gpus=2)
    for case in [*plan.verdict_cases(settings), plan.timed_case(settings)]:
        steps = [fault["step"] for fault in case.faults]
        assert steps == sorted(set(steps))
        load(case.workload, training={"steps": case.steps}, rehearsal={"faults": list(case.faults)})


def test_step_time_is_from_start_to_start() -> None:
    starts = {1: 0.0, 2: 5.0, 3: 6.0, 4: 8.0}
    events = [{"event": "step", "rank": 0, "step": step, "start": start} for step, start in starts.items()]
    assert seconds_per_step(events, first=2, last=3) == 1.5


def test_what_is_measured_is_not_measured_again_and_failures_are(tmp_path: Path) -> None:
    results = Results(tmp_path / "rows.jsonl")
    results.add("a", [{"section": "speed", "failure": "no"}])
    results.add("b", [{"section": "speed"}])
    again = Results(tmp_path / "rows.jsonl")
    assert (again.has("a"), again.has("b"), again.has("c")) == (False, True, False)
    assert [row["measurement"] for row in newest(again.rows)] == ["b"]


def test_names_of_measurements_differ() -> None:
    settings = Settings(directory=Path("r"), data=Path("d"), device="cuda", gpus=2)
    names = [measurement.name for measurement in plan.measurements(settings)]
    assert len(names) == len(set(names))
    case = SpeedCase(
        workload=Workload(model="1b", sequence_length_tokens=8192, samples_per_rank=4),
        ranks=1,
        resilient=True,
    )
    assert case.name == "speed 1b 4x8192 x1 on" in names


def test_two_ranks_measure_copies_and_the_rows_become_table_and_plot(tmp_path: Path) -> None:
    output = tmp_path / "rows.jsonl"
    command = [sys.executable, "-m", "bench.multi_gpu", "--output", str(output), "--device", "cpu"]
    options = ["--ranks", "2", "--tiny", "--only", "copies", "--directory", str(tmp_path)]
    environ = {**os.environ, "PYTHONPATH": str(ROOT)}
    done = subprocess.run(
        [*command, *options], env=environ, cwd=ROOT, capture_output=True, text=True, timeout=110
    )
    assert done.returncode == 0, done.stderr
    rows = list(read_rows(output))
    assert not [row for row in rows if "failure" in row], rows
    assert {row["section"] for row in rows} == {"host_copies", "peer_copies", "contention"}
    text = table.render([{**row, "machine": MACHINE} for row in rows])
    assert "rank 0 to rank 1, verified" in text
    assert "to host" in text
    assert ElementTree.fromstring(plot.contention(rows)).tag.endswith("svg")


@pytest.mark.parametrize(
    ("text", "message"),
    [(None, "holds no rows; measure first"), ("{}\n{", "line 2 is no JSON"), ("", "holds no rows")],
)
def test_a_table_of_nothing_is_refused(
    tmp_path: Path, text: str | None, message: str, capsys: pytest.CaptureFixture[str]
) -> None:
    rows = tmp_path / "rows.jsonl"
    if text is not None:
        rows.write_text(text)
    assert main(["--output", str(rows), "--table"]) == EXIT_CONFIG
    assert message in capsys.readouterr().err


def test_a_machine_without_gpus_is_told_so(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("PATH", str(tmp_path))  # holds no nvidia-smi
    assert main(["--output", str(tmp_path / "rows.jsonl")]) == EXIT_CONFIG
    assert "--device='cuda': there is no GPU; try it with --device cpu --tiny" in capsys.readouterr().err
