"""The operator's commands against a real API server."""

from __future__ import annotations

import dataclasses
import json
import os
import re
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import yaml

from k8s.jobs import KINDS_OF_A_JOB, selector_of
from k8s.manifests import job_name
from k8s.network import control_name
from k8s.prerequisites import prerequisites
from k8s.publish import STATUS_ANNOTATION
from k8s.run import Run
from k8s.submit import submit
from tests.cluster.command_line import ROOT, k8s, write_outputs
from tests.cluster.control_plane import ControlPlane
from tests.cluster.nodes import FakeNode, Kubelets
from tests.cluster.training_run import RunInCluster, has_condition
from tests.cluster.waiting import wait_until
from training.errors import EXIT_CONFIG, EXIT_DONE
from training.events import EventLog


@pytest.fixture
def files(make_cluster_run: Any, tmp_path: Path) -> tuple[Run, Path, Path]:
    """Return a run, and the recipe and outputs files that it comes from."""
    run = make_cluster_run(spares=0)
    recipe = tmp_path / "recipe.toml"
    recipe.write_text(run.recipe_text)
    return run, recipe, write_outputs(tmp_path / "outputs.json", run.outputs)


@pytest.fixture
def submitted(files: tuple[Run, Path, Path], control_plane: ControlPlane) -> RunInCluster:
    run, recipe, outputs = files
    in_cluster = RunInCluster(run, control_plane)
    in_cluster.kubectl.apply(yaml.safe_dump_all(prerequisites(run)))
    done = k8s("submit", recipe, "--outputs", outputs)
    assert done.returncode == 0, done.stderr
    in_cluster.wait_for_running(2)
    return in_cluster


def test_dry_run_checks_on_the_server_and_stores_nothing(
    files: tuple[Run, Path, Path], control_plane: ControlPlane
) -> None:
    run, recipe, outputs = files
    in_cluster = RunInCluster(run, control_plane)
    in_cluster.kubectl.apply(yaml.safe_dump_all(prerequisites(run)))
    done = k8s("submit", recipe, "--outputs", outputs, "--dry-run=server")
    assert done.stdout.count("created (server dry run)") == 8
    assert not in_cluster.kubectl.list_objects("job")


def test_submit_without_its_namespace_says_so(files: tuple[Run, Path, Path]) -> None:
    _, recipe, outputs = files
    done = k8s("submit", recipe, "--outputs", outputs)
    assert done.returncode == 1
    assert "not found" in done.stderr
    assert "Traceback" not in done.stderr


def test_a_second_job_of_a_living_run_is_refused(
    submitted: RunInCluster, files: tuple[Run, Path, Path]
) -> None:
    _, recipe, outputs = files
    recipe.write_text(recipe.read_text().replace("steps = 5000", "steps = 6000"))
    done = k8s("submit", recipe, "--outputs", outputs)
    assert done.returncode == 1
    assert f"Job {submitted.name} of this run is running; stop it with" in done.stderr


def test_a_job_that_its_queue_has_admitted_is_not_suspended_again(
    make_cluster_run: Any, control_plane: ControlPlane, tmp_path: Path
) -> None:
    # GIVEN a suspended Job that Kueue resumes
    run = make_cluster_run(kubernetes={"queue": "team-a"}, spares=0)
    in_cluster = RunInCluster(run, control_plane)
    in_cluster.kubectl.apply(yaml.safe_dump_all(prerequisites(run)))
    submit(in_cluster.kubectl, run)
    assert in_cluster.job()["spec"]["suspend"]
    in_cluster.kubectl.patch("job", in_cluster.name, {"spec": {"suspend": False}})
    in_cluster.wait_for_running(2)
    # WHEN it is submitted again, after somebody has removed its Service
    in_cluster.kubectl.run("delete", "service", in_cluster.name)
    answer = submit(in_cluster.kubectl, run)
    # THEN
    assert answer.endswith(f"job.batch/{in_cluster.name} is running already\n")
    assert not in_cluster.job()["spec"]["suspend"]
    assert in_cluster.kubectl.get("service", in_cluster.name) is not None


def test_a_finished_job_is_submitted_again(
    submitted: RunInCluster, files: tuple[Run, Path, Path], kubelets: Kubelets
) -> None:
    _, recipe, outputs = files
    before = submitted.job()["metadata"]["uid"]
    kubelets.exit(submitted.pod(0), EXIT_CONFIG)
    submitted.wait_for_job(lambda status: has_condition(status, "Failed"), "failed")
    done = k8s("submit", recipe, "--outputs", outputs)
    assert done.returncode == 0, done.stderr
    assert submitted.job()["metadata"]["uid"] != before
    submitted.wait_for_running(2)


def test_delete_leaves_nothing(submitted: RunInCluster) -> None:
    done = k8s("delete", "llama3-8b", "--namespace", submitted.kubectl.namespace)
    assert done.returncode == 0, done.stderr
    assert "/fsx/runs/llama3-8b stays on the shared file system" in done.stdout
    assert _left(submitted) == []


def test_a_run_that_stops_keeps_its_control_store_to_the_last_pod(
    submitted: RunInCluster, files: tuple[Run, Path, Path], kubelets: Kubelets, nodes: dict[str, FakeNode]
) -> None:
    # GIVEN a node whose pod takes its time to end
    pod = submitted.pod(0)
    slow, node = pod["metadata"]["name"], pod["spec"]["nodeName"]
    kubelets.lose(node)
    command = [sys.executable, "-m", "k8s", "delete", submitted.name]
    arguments = ["--namespace", submitted.kubectl.namespace]
    deletion = subprocess.Popen([*command, *arguments], cwd=ROOT, stdout=subprocess.PIPE, text=True)
    assert deletion.stdout is not None
    try:
        lines = iter(deletion.stdout.readline, "")
        assert next(lines) == f"stopping {submitted.name}: its pods have 1309 s to save and end\n"
        # whose node may be not ready by now
        assert any(re.match(rf"pods left: {slow} on {node}( \(not ready\))?$", line) for line in lines)
        wait_until(lambda: len(submitted.pods()) == 1, "the other pod ended")
        # THEN the control store stays, and nobody starts a second Job
        assert submitted.kubectl.get("job", control_name(submitted.name)) is not None
        _, recipe, outputs = files
        again = k8s("submit", recipe, "--outputs", outputs)
        assert f"Job {submitted.name} is stopping; submit again" in again.stderr
    finally:
        kubelets.recover(nodes[node])
        deletion.communicate(timeout=90)
    assert _left(submitted) == []


def test_all_objects_go_with_the_job(submitted: RunInCluster) -> None:
    # as they do when its TTL is over
    submitted.kubectl.run("delete", "job", submitted.name, "--wait=false")
    wait_until(lambda: not _left(submitted), "nothing left")


def test_status_before_the_first_event(submitted: RunInCluster) -> None:
    done = k8s("status", submitted.name, "--namespace", submitted.kubectl.namespace)
    assert f"Job {submitted.name}: running" in done.stdout
    assert "no event yet" in done.stdout
    assert "p5-a" in done.stdout


def test_status_of_nothing_says_how_to_list(namespace: str) -> None:
    done = k8s("status", "other", "--namespace", namespace)
    assert done.returncode == 1
    assert "NAME='other': no such run or Job in namespace" in done.stderr


def test_status_from_events_to_people(
    submitted: RunInCluster, control_plane: ControlPlane, tmp_path: Path
) -> None:
    # GIVEN a run that has trained on the node of index 0, and its publisher with its own rights
    run_dir, node = tmp_path / "run", submitted.pod(0)["spec"]["nodeName"]
    write_events(run_dir, node=node)
    publisher = start_publisher(submitted, control_plane, run_dir)
    try:
        # WHEN it has published
        report = wait_until(lambda: training_report(submitted), "status published")
    finally:
        publisher.terminate()
        output = publisher.communicate(timeout=60)[0]
    # THEN anybody who may read the Job sees what the events say
    assert publisher.returncode == 0, output
    training = report["training"]
    assert (training["step"], training["loss"], training["durable_step"]) == (10, 2.5, 5)
    roles = {pod["node"]: (pod["role"], pod["ranks"]) for pod in report["pods"]}
    assert roles.pop(node) == ("training", [0, 1])
    assert list(roles.values()) == [("spare", [])]


def test_control_pod_goes_with_a_failed_run(
    submitted: RunInCluster, control_plane: ControlPlane, kubelets: Kubelets, tmp_path: Path
) -> None:
    write_events(tmp_path / "run", node="p5-a1")
    publisher = start_publisher(submitted, control_plane, tmp_path / "run")
    try:
        kubelets.exit(submitted.pod(0), EXIT_CONFIG)
        control = control_name(submitted.name)
        wait_until(lambda: submitted.kubectl.get("job", control) is None, "control Job removed")
        assert publisher.wait(timeout=60) == EXIT_DONE
    finally:
        publisher.terminate()
        publisher.communicate(timeout=60)
    done = k8s("status", submitted.name, "--namespace", submitted.kubectl.namespace, "--watch", "--json")
    report = json.loads(done.stdout)
    assert report["state"] == "failed"
    assert "PodFailurePolicy" in report["failure"]
    assert report["training"]["step"] == 10, "the last status outlives the pods"


def test_a_run_stops_before_its_capacity_ends(
    submitted: RunInCluster, files: tuple[Run, Path, Path], control_plane: ControlPlane, tmp_path: Path
) -> None:
    publisher = start_publisher(submitted, control_plane, tmp_path / "run", "--stop-at=2026-11-01T00:00:00Z")
    try:
        wait_until(lambda: not submitted.pods(), "trainers stopped")
        submitted.wait_for_state("stopped")
        # THEN the Job is kept, with its control store
        status = k8s("status", submitted.name, "--namespace", submitted.kubectl.namespace)
        assert f"Job {submitted.name}: stopped" in status.stdout
        assert submitted.kubectl.get("job", control_name(submitted.name)) is not None
    finally:
        publisher.terminate()
        publisher.communicate(timeout=60)
    # AND goes on when it is submitted again
    _, recipe, outputs = files
    assert k8s("submit", recipe, "--outputs", outputs).returncode == 0
    submitted.wait_for_running(2)


def test_a_run_is_not_submitted_to_capacity_that_ends(files: tuple[Run, Path, Path], tmp_path: Path) -> None:
    run, recipe, _ = files
    outputs = write_outputs(
        tmp_path / "ended.json", dataclasses.replace(run.outputs, capacity_end="2026-11-01T11:30:00Z")
    )
    done = k8s("submit", recipe, "--outputs", outputs)
    assert done.returncode == 1
    assert "CapacityEnd='2026-11-01T11:30:00Z': runs stopped at 2026-11-01 10:08 UTC" in done.stderr


def test_data_preparation_is_a_job_of_its_own(submitted: RunInCluster, files: tuple[Run, Path, Path]) -> None:
    run, recipe, outputs = files
    assert k8s("submit", recipe, "--outputs", outputs, "--job", "prepare").returncode == 0
    name, namespace = job_name(run, "prepare"), submitted.kubectl.namespace
    done = k8s("status", name, "--namespace", namespace)
    assert f"Job {name}:" in done.stdout
    assert "training" not in done.stdout, "it has neither ranks nor spares"
    assert k8s("delete", name, "--namespace", namespace).returncode == 0
    assert submitted.kubectl.get("job", name) is None
    assert submitted.kubectl.get("job", submitted.name) is not None


def test_an_api_server_that_is_not_there(tmp_path: Path) -> None:
    config = json.loads(Path(os.environ["KUBECONFIG"]).read_text())
    config["clusters"][0]["cluster"]["server"] = "https://127.0.0.1:9"
    (tmp_path / "kubeconfig").write_text(json.dumps(config))
    command = [sys.executable, "-m", "k8s", "status", "llama3-8b"]
    environment = {**os.environ, "KUBECONFIG": str(tmp_path / "kubeconfig")}
    done = subprocess.run(command, capture_output=True, text=True, cwd=ROOT, env=environment, timeout=100)
    assert done.returncode == 1
    assert "run `aws eks update-kubeconfig --name CLUSTER`" in done.stderr


def test_logs_of_all_nodes_one_pod_and_the_store(submitted: RunInCluster) -> None:
    place = (submitted.name, "--namespace", submitted.kubectl.namespace)
    pods = [submitted.pod(index)["metadata"]["name"] for index in (0, 1)]
    everything = k8s("logs", *place).stdout
    assert all(f"{pod} trainer was asked" in everything for pod in pods)
    assert k8s("logs", *place, "--index", "1").stdout == f"{pods[1]} trainer was asked\n"
    wait_until(lambda: "control was asked" in k8s("logs", *place, "--control").stdout, "control pod placed")


def test_logs_of_the_pod_that_a_rank_runs_in(submitted: RunInCluster) -> None:
    pod = submitted.pod(1)
    status = json.dumps({"steps": 10, "ranks": {"0": "elsewhere", "8": pod["spec"]["nodeName"]}})
    submitted.kubectl.patch("job", submitted.name, {"metadata": {"annotations": {STATUS_ANNOTATION: status}}})
    done = k8s("logs", "llama3-8b", "--namespace", submitted.kubectl.namespace, "--rank", "8")
    assert done.stdout == f"{pod['metadata']['name']} trainer was asked\n"
    nowhere = k8s("logs", "llama3-8b", "--namespace", submitted.kubectl.namespace, "--rank", "3")
    assert nowhere.returncode == 1
    assert "--rank=3: no pod runs it now; pods are 0: ranks -, 1: ranks [8]" in nowhere.stderr


def write_events(run_dir: Path, *, node: str) -> None:
    now = time.time()
    for rank in (0, 1):
        with EventLog(run_dir, role="rank", node=node, rank=rank, round=0, iteration=0) as log:
            log.emit("enter", time=now - 30, born=now - 31)
            for number in range(1, 11):
                at = now - 20 + number
                log.emit("step", time=at, step=number, start=at - 1, seconds=1.0, tokens=100)
                log.emit("metrics", time=at, step=number, loss=2.5)
            log.emit("checkpoint", time=now, step=5, status="committed")


def start_publisher(
    submitted: RunInCluster, control_plane: ControlPlane, run_dir: Path, *options: str
) -> subprocess.Popen[str]:
    """Run the sidecar's own command with the token of its service account."""
    outputs = submitted.run.outputs
    token = submitted.kubectl.run("create", "token", outputs.control_service_account).strip()
    recipe = run_dir.parent / "mounted.toml"
    recipe.write_text(submitted.run.recipe_text)
    command = [sys.executable, "-m", "k8s", "publish", submitted.name, "--namespace", outputs.namespace]
    arguments = [f"--recipe={recipe}", f"--run-dir={run_dir}", "--period-seconds=0.5", *options]
    kubeconfig = control_plane.kubeconfig(token)
    return subprocess.Popen(
        [*command, *arguments],
        cwd=ROOT,
        env={**os.environ, "KUBECONFIG": str(kubeconfig)},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
    )


def training_report(run: RunInCluster) -> dict[str, Any] | None:
    done = k8s("status", run.name, "--namespace", run.kubectl.namespace, "--json")
    report: dict[str, Any] = json.loads(done.stdout)
    return report if report["training"] else None


def _left(run: RunInCluster) -> list[str]:
    kinds = ",".join((*KINDS_OF_A_JOB, "pod"))
    names = run.kubectl.run("get", kinds, f"--selector={selector_of(run.name)}", "--output=name")
    return names.split()
