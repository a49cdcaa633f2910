from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from k8s.cost import hourly_items, main, run_dollars
from k8s.doctor import load_cluster
from stacks.config import CapacityConfig, ClusterConfig
from tests.k8s.conftest import ROOT
from training.errors import ConfigError
from training.events import EventLog
from training.goodput import main as training_goodput

START = 1_800_000_000.0


@pytest.fixture
def config() -> ClusterConfig:
    return load_cluster(ROOT / "cdk.json")


def with_gpu(config: ClusterConfig, **fields: object) -> ClusterConfig:
    return dataclasses.replace(config, gpu=dataclasses.replace(config.gpu, **fields))  # type: ignore[arg-type]


def gpu_hour(config: ClusterConfig) -> float:
    return next(iter(hourly_items(config))).dollars_per_hour


def test_gpu_nodes_by_capacity_mode(config: ClusterConfig) -> None:
    on_demand = with_gpu(config, nodes=2, spares=0)
    assert gpu_hour(on_demand) == pytest.approx(110.08)
    block = CapacityConfig(mode="capacity-block", reservation_id="cr-0123456789abcdef0")
    assert gpu_hour(with_gpu(on_demand, capacity=block)) == pytest.approx(78.66)
    assert gpu_hour(with_gpu(config, nodes=2, spares=1)) == pytest.approx(3 * 55.04)


def test_a_parked_group_costs_nothing(config: ClusterConfig) -> None:
    parked = list(hourly_items(with_gpu(config, parked=True)))
    assert parked[0].dollars_per_hour == 0
    assert 0 < sum(item.dollars_per_hour for item in parked) < 1


def test_a_type_without_a_list_price_asks_for_one(config: ClusterConfig) -> None:
    unlisted = with_gpu(config, instance_type="p5e.48xlarge")
    with pytest.raises(ConfigError, match="give --gpu-hour DOLLARS"):
        list(hourly_items(unlisted))
    assert next(iter(hourly_items(unlisted, gpu_hour=40.0))).dollars_per_hour == 40.0 * 3


def test_a_runs_dollars_add_up(config: ClusterConfig) -> None:
    items = list(hourly_items(config))
    report = {"parts": {"productive": 3000.0, "restart": 500.0}, "residual_seconds": 100.0}
    dollars = run_dollars(items, report)
    assert sum(dollars.values()) == pytest.approx(sum(item.dollars_per_hour for item in items))
    assert dollars["residual"] == pytest.approx(dollars["restart"] / 5)


@pytest.fixture
def goodput(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> Path:
    """The file that `training goodput RUN_DIR --json` writes about a run of ten steps of a second."""
    run_dir, file = tmp_path / "run", tmp_path / "goodput.json"
    with EventLog(run_dir, role="rank", node="node-a", rank=0, round=0, iteration=0) as log:
        log.emit("enter", time=START, born=START - 1)
        log.emit("span", time=START + 10, name="rendezvous", start=START, seconds=10.0)
        for step in range(1, 11):
            at = START + 10 + step
            log.emit("step", time=at, step=step, start=at - 1, seconds=1.0, tokens=100)
    assert training_goodput([str(run_dir), "--json"]) == 0
    file.write_text(capsys.readouterr().out)
    return file


def test_report_carries_the_date_of_its_prices(goodput: Path, capsys: pytest.CaptureFixture[str]) -> None:
    cluster = str(ROOT / "cdk.json")
    assert main(["--cluster", cluster, "--goodput", str(goodput), "--json"]) == 0
    result = json.loads(capsys.readouterr().out)
    assert result["prices_as_of"] == "2026-07-20"
    wall_seconds = json.loads(goodput.read_text())["wall_seconds"]
    assert result["run"]["dollars"] == pytest.approx(result["dollars_per_hour"] * wall_seconds / 3600)
    assert main(["--cluster", cluster, "--goodput", str(goodput)]) == 0
    text = capsys.readouterr().out
    assert "list prices of us-east-1 as of 2026-07-20" in text
    assert "productive" in text
