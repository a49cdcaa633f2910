from __future__ import annotations

from typing import Any

import pytest

from tests.tiny import tiny_recipe
from training import environment
from training.config import JobConfig
from training.errors import ConfigError
from training.launcher_arguments import NodePlace, control_arguments, launcher_arguments, node_place


def recipe(**sections: dict[str, Any]) -> JobConfig:
    from pathlib import Path

    job = {"name": "run", "nodes": 2, "ranks_per_node": 2, "spares": 1}
    sections = {"job": job, **sections}
    return tiny_recipe(Path("data"), ranks=2, **sections)


PLACE = NodePlace(control=("control", 29500), address="10.0.0.7", index=1)


def test_launcher_command_line(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.RUN_ID, "run-7")
    config = recipe(recovery={"layers": "in_job", "maximum_restarts": 9, "step_timeout_seconds": 12.5})
    arguments = launcher_arguments(config, place=PLACE, stop_seconds=27, worker=["rank", "--flag"])
    assert arguments == [
        "--nnodes=2:1000",
        "--nproc-per-node=2",
        "--max-restarts=9",
        "--rdzv-backend=c10d",
        "--rdzv-endpoint=control:29500",
        "--rdzv-id=run-7",
        "--rdzv-conf=is_host=false,store_connect_wait_seconds=600,read_timeout=30,join_timeout=86400",
        "--local-addr=10.0.0.7",
        "--monitor-interval=0.1",
        "--workers-stop-timeout=5",
        "--term-timeout=27",
        "--ft-gpu-memory-reclaim-timeout=0",
        "--ft-enable-log-server=false",
        "--ft-max-no-progress-cycles=0",
        "--ft-rank-section-timeouts=setup:600,step:12.5,checkpoint:600",
        "--ft-rank-out-of-section-timeout=300",
        "--ft-workload-check-interval=1",
        "--no-python",
        "rank",
        "--flag",
    ]


def test_save_may_take_as_long_as_its_deadline() -> None:
    config = recipe(checkpoint={"writer": "holdfast", "deadline_seconds": 1800.0})
    arguments = launcher_arguments(config, place=PLACE, stop_seconds=1, worker=[])
    assert "--ft-rank-section-timeouts=setup:600,step:300,checkpoint:1830" in arguments


def test_launcher_and_control_agree_on_run_and_nodes(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv(environment.RUN_ID, raising=False)
    ours = launcher_arguments(recipe(), place=PLACE, stop_seconds=1, worker=[])
    theirs = control_arguments(recipe(), host="0.0.0.0", port=29500)
    shared = {argument for argument in theirs if argument.startswith(("--nnodes", "--rdzv-id"))}
    assert shared == {"--nnodes=2:1000", "--rdzv-id=run"}
    assert shared <= set(ours)


@pytest.mark.parametrize("layers", ["none", "in_process"])
def test_no_restart_of_ranks_without_the_in_job_layer(layers: str) -> None:
    recovery = {"layers": layers, "group_timeout_seconds": 5.0}
    arguments = launcher_arguments(recipe(recovery=recovery), place=PLACE, stop_seconds=1, worker=[])
    assert "--max-restarts=0" in arguments


def test_several_nodes_need_a_control_store() -> None:
    with pytest.raises(ConfigError, match="HOLDFAST_CONTROL: is required for nodes=2; start"):
        node_place(recipe(), control=None)


def test_place_of_a_node_on_this_machine(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.NODE_INDEX, "2")
    place = node_place(recipe(), control=("127.0.0.1", 1))
    assert (place.address, place.index) == ("127.0.0.1", 2)


def test_place_of_a_pod(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(environment.ADDRESS, "10.0.0.9")
    assert node_place(recipe(), control=("control", 1)).address == "10.0.0.9"
