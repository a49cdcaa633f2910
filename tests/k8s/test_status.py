from __future__ import annotations

import json
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8s.examples import P5_RECIPE
from k8s.progress import Restarts, RunStatus
from k8s.report import PodStatus, Report
from k8s.status import main
from k8s.status_table import render_status
from tests.k8s.conftest import ROOT
from training.events import EventLog


def status(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k8s", "status", "llama3-8b", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


@pytest.fixture
def run_dir(tmp_path: Path) -> Path:
    now = time.time()
    with EventLog(tmp_path, role="rank", node="node-a", rank=0, round=0, iteration=0) as log:
        log.emit("enter", time=now - 30, born=now - 31)
        log.emit("span", time=now - 21, name="rendezvous", start=now - 22, seconds=1.0)
        for number in range(1, 11):
            at = now - 20 + number
            log.emit("step", time=at, step=number, start=at - 1, seconds=1.0, tokens=100)
            log.emit("metrics", time=at, step=number, loss=2.5)
    return tmp_path


def test_reads_a_run_directory_without_a_cluster(run_dir: Path) -> None:
    done = status("--run-dir", run_dir, "--recipe", P5_RECIPE, "--json")
    assert done.returncode == 0, done.stderr
    training = json.loads(done.stdout)["training"]
    assert (training["step"], training["steps"], training["loss"]) == (10, 5000, 2.5)
    assert training["tokens_per_second"] == pytest.approx(100.0, rel=0.01)
    assert 0 < training["goodput_percent"] <= 100


def test_a_directory_needs_its_recipe(run_dir: Path) -> None:
    done = status("--run-dir", run_dir)
    assert done.returncode == 64
    assert "--recipe: is needed with --run-dir" in done.stderr


def test_a_directory_that_is_not_there(tmp_path: Path) -> None:
    done = status("--run-dir", tmp_path / "none", "--recipe", P5_RECIPE)
    assert done.returncode == 64
    assert "is no directory; give the directory of the run" in done.stderr


def test_a_directory_without_events_is_a_run_that_has_not_begun(tmp_path: Path) -> None:
    done = status("--run-dir", tmp_path, "--recipe", P5_RECIPE)
    assert done.stdout.splitlines()[1] == "no event yet: ranks have not reached training"


@pytest.mark.parametrize(("code", "state"), [(143, "stopped"), (65, "failed"), (1, "running")])
def test_watching_ends_with_the_run(run_dir: Path, code: int, state: str) -> None:
    with EventLog(run_dir, role="supervisor", node="node-a") as supervisor:
        supervisor.emit("launch", attempt=0)
        supervisor.emit("exit", exit_code=code)
    watch = [] if state == "running" else ["--watch"]
    done = status("--run-dir", run_dir, "--recipe", P5_RECIPE, "--json", *watch)
    assert json.loads(done.stdout)["state"] == state


def test_without_kubectl_says_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("KUBECTL", "no-such-kubectl")
    done = status()
    assert done.returncode == 1
    assert done.stderr.startswith("error: kubectl: not found; install it")


def test_a_watch_outlives_an_api_server_that_is_away(
    kubectl_answers: Callable[..., None],
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
    capsys: pytest.CaptureFixture[str],
) -> None:
    # GIVEN a Job that runs, an API server that is away, and then the Job's end
    def job(**status: Any) -> dict[str, Any]:
        labels = {"holdfast/run": "llama3-8b", "app.kubernetes.io/component": "trainer"}
        return {"metadata": {"name": "job", "labels": labels}, "spec": {}, "status": status}

    complete = job(conditions=[{"type": "Complete", "status": "True"}])
    waits = iter([(tmp_path / "job.json").unlink, lambda: kubectl_answers("job", complete)])
    monkeypatch.setattr("k8s.status.time.sleep", lambda _: next(waits)())
    for kind in ("pod", "node"):
        kubectl_answers(kind, {"items": []})
    kubectl_answers("job", job(ready=2))
    # THEN
    assert main(["job", "--watch", "--json"]) == 0
    printed = capsys.readouterr()
    assert [json.loads(line)["state"] for line in printed.out.splitlines()] == [
        "running",
        "running",
        "complete",
    ]
    assert printed.err.startswith("warning: kubectl get: ")


def test_table_for_people() -> None:
    training = RunStatus(
        steps=5000,
        step=1234,
        loss=2.34567,
        tokens_per_second=412_345.6,
        eta_seconds=97_200.0,
        durable_step=1200,
        memory_step=1234,
        failed_saves=1,
        goodput_percent=96.31,
        restarts=Restarts(in_process=1, in_job=2, causes={"RuntimeError": 1, "SIGKILL": 2}),
        updated=990.0,
    )
    pods = [
        PodStatus(
            index=0,
            name="llama3-8b-1-0",
            created="2026-07-01T00:00:00Z",
            node="node-a",
            node_ready=True,
            phase="Running",
            role="training",
            ranks=list(range(8)),
            restarts=0,
        ),
        PodStatus(
            index=1,
            name="llama3-8b-1-1",
            created="2026-07-01T00:00:01Z",
            node="node-b",
            node_ready=False,
            phase="Terminating",
            role="spare",
            ranks=[],
            restarts=1,
            reason="DeletionByTaintManager",
        ),
    ]
    report = Report(run="llama3-8b", job="llama3-8b-1", state="running", pods=pods, training=training)
    heading, *lines = render_status(report, now=1000.0).splitlines()
    assert heading.startswith("run llama3-8b   Job llama3-8b-1: running")
    assert lines == [
        "step 1234/5000 (24.7%)   loss 2.3457   412,346 tokens/s   ETA 1 d 3 h   (10 s ago)",
        "goodput 96.3%   durable step 1200   RAM step 1234   evaluation loss -",
        "problems: failed saves 1",
        "restarts: in-process 1, in-job 2, launcher 0, pod 0   causes: RuntimeError 1, SIGKILL 2",
        "",
        "nodes: 1 training, 1 spare, 2 in all",
        "INDEX  NODE                ROLE      RANKS  PHASE        RESTARTS  REASON",
        "0      node-a              training  0-7    Running      0",
        "1      node-b (not ready)  spare     -      Terminating  1         DeletionByTaintManager",
    ]
