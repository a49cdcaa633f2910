from __future__ import annotations

import dataclasses
import re
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import kubernetes_validate
import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from eks_training.instance_types import INSTANCE_TYPES
from k8s.examples import rendered_examples
from k8s.manifests import JOB_KINDS, job_name, job_objects, render
from k8s.network import EPHEMERAL_PORTS, LISTENING_PORTS
from k8s.outputs import StackOutputs
from k8s.prerequisites import prerequisites
from k8s.run import Run, make_run
from tests.k8s.conftest import ROOT, MakeRun
from training import environment
from training.config import JobConfig

EKS_VERSIONS = [f"1.{minor}" for minor in range(32, 38)]
DNS_LABEL = re.compile(r"[a-z0-9]([a-z0-9-]{0,61}[a-z0-9])?")

cheap = settings(suppress_health_check=[HealthCheck.function_scoped_fixture], max_examples=30, deadline=None)


@st.composite
def clusters(draw: st.DrawFn) -> dict[str, Any]:
    """Any node count, any number of spares below it, every instance type, every option."""
    instance = INSTANCE_TYPES[draw(st.sampled_from(sorted(INSTANCE_TYPES)))]
    nodes = draw(st.integers(1, 500))
    spares = draw(st.integers(0, min(nodes - 1, 99)))
    return {
        "job": {
            "name": draw(st.from_regex(r"[a-z]([a-z0-9-]{0,38}[a-z0-9])?", fullmatch=True)),
            "nodes": nodes,
            "spares": spares,
            "ranks_per_node": instance.gpus,
        },
        "kubernetes": {
            "model_parameters": 1_000_000_000,
            "queue": draw(st.sampled_from(["", "team-a"])),
            "hugepages_mib": draw(st.sampled_from([0, 5120])),
            "token_secret": draw(st.sampled_from(["", "huggingface"])),
            "image_pull_secret": draw(st.sampled_from(["", "registry"])),
            "lock_memory": draw(st.sampled_from(["pod", "node"])),
            "restart_in_place": draw(st.booleans()),
        },
        "instance_type": instance.name,
        "nodes": nodes,
        "spares": spares,
    }


def training_job(run: Run) -> dict[str, Any]:
    return job_objects(run)[-1]


def trainer(run: Run) -> dict[str, Any]:
    return training_job(run)["spec"]["template"]["spec"]["containers"][0]  # type: ignore[no-any-return]


def pod_specs(objects: list[dict[str, Any]]) -> Iterator[dict[str, Any]]:
    return (o["spec"]["template"]["spec"] for o in objects if o["kind"] == "Job")


@pytest.mark.parametrize(
    ("path", "text"), list(rendered_examples()), ids=lambda value: getattr(value, "stem", "")
)
def test_examples_are_current(path: Any, text: str) -> None:
    assert path.read_text() == text, "run `python -m k8s.examples` and review the difference"


@pytest.mark.parametrize("version", EKS_VERSIONS)
@pytest.mark.parametrize("kind", JOB_KINDS)
def test_every_supported_version_knows_all_fields(make: MakeRun, version: str, kind: Any) -> None:
    for options in ({}, {"queue": "team-a", "hugepages_mib": 5120, "image_pull_secret": "registry"}):
        run = make(kubernetes=options)
        for manifest in [*prerequisites(run), *job_objects(run, kind)]:
            kubernetes_validate.validate(manifest, version, strict=True)


@pytest.mark.parametrize("version", ["1.35", "1.36", "1.37"])
def test_restart_rules_are_known_where_they_are_allowed(make: MakeRun, version: str) -> None:
    run = make(kubernetes={"restart_in_place": True}, kubernetes_version=version)
    kubernetes_validate.validate(training_job(run), version, strict=True)
    assert trainer(run)["restartPolicyRules"][0]["exitCodes"]["values"] == [1]


@given(cluster=clusters())
@cheap
def test_names_stay_within_the_limits_of_kubernetes(make: MakeRun, cluster: dict[str, Any]) -> None:
    run = make(**cluster)
    for kind in JOB_KINDS:
        name = job_name(run, kind)
        # the pods: JOB-INDEX, JOB-control-xxxxx, JOB-xxxxx
        for pod in (f"{name}-{run.pods - 1}", f"{name}-control-abcde", f"{name}-abcde"):
            assert DNS_LABEL.fullmatch(pod)
        for manifest in job_objects(run, kind):
            assert len(manifest["metadata"]["name"]) <= 63
            for value in manifest["metadata"]["labels"].values():
                assert len(value) <= 63


@given(cluster=clusters())
@cheap
def test_a_training_pod_fits_its_node_and_only_one_does(make: MakeRun, cluster: dict[str, Any]) -> None:
    run = make(**cluster)
    requests = trainer(run)["resources"]["requests"]
    limits = trainer(run)["resources"]["limits"]
    assert int(requests["nvidia.com/gpu"]) == run.instance.gpus
    assert int(requests["vpc.amazonaws.com/efa"]) == run.instance.efa_interfaces
    assert int(requests["cpu"]) * 1000 < run.instance.allocatable_cpu_millicores
    memory_mib = int(requests["memory"].removesuffix("Gi")) * 1024
    assert memory_mib < run.instance.requestable_memory_mib < 2 * memory_mib
    assert "cpu" not in limits
    assert limits == {name: value for name, value in requests.items() if name != "cpu"}


@given(cluster=clusters())
@cheap
def test_job_counts_spares_but_ends_without_them(make: MakeRun, cluster: dict[str, Any]) -> None:
    run = make(**cluster)
    spec = training_job(run)["spec"]
    assert spec["completions"] == spec["parallelism"] == run.recipe.job.nodes + run.recipe.job.spares
    assert spec["successPolicy"]["rules"] == [{"succeededCount": run.recipe.job.nodes}]
    assert "backoffLimit" not in spec


@given(cluster=clusters())
@cheap
def test_every_pod_is_unprivileged(make: MakeRun, cluster: dict[str, Any]) -> None:
    run = make(**cluster)
    for kind in JOB_KINDS:
        for spec in pod_specs(job_objects(run, kind)):
            assert spec["automountServiceAccountToken"] is False
            assert not {"hostNetwork", "hostPID", "hostIPC"} & spec.keys()
            assert all("hostPath" not in volume for volume in spec["volumes"])
            for container in [*spec["containers"], *spec.get("initContainers", ())]:
                security = container["securityContext"]
                assert security["allowPrivilegeEscalation"] is False
                assert security["capabilities"]["drop"] == ["ALL"]
                assert security["capabilities"].get("add", []) in ([], ["IPC_LOCK"])
                assert container["command"][0] == "python"  # exec form: signals reach process 1


@given(cluster=clusters())
@cheap
def test_mounts_name_volumes_of_their_pod(make: MakeRun, cluster: dict[str, Any]) -> None:
    run = make(**cluster)
    for kind in JOB_KINDS:
        for spec in pod_specs(job_objects(run, kind)):
            volumes = {volume["name"] for volume in spec["volumes"]}
            for container in [*spec["containers"], *spec.get("initContainers", ())]:
                assert {mount["name"] for mount in container["volumeMounts"]} <= volumes


def test_listening_ports_are_outside_the_range_of_outgoing_connections(make: MakeRun) -> None:
    low, high = EPHEMERAL_PORTS
    assert not [port for port in LISTENING_PORTS if low <= port <= high]
    assert high - low > 60999 - 32768, "wider than the kernel's default"
    sysctls = training_job(make())["spec"]["template"]["spec"]["securityContext"]["sysctls"]
    assert sysctls == [{"name": "net.ipv4.ip_local_port_range", "value": f"{low} {high}"}]


def test_environment_is_the_one_that_training_reads(make: MakeRun) -> None:
    names = {variable["name"] for variable in trainer(make())["env"]}
    needed = {
        environment.CONTROL,
        environment.RUN_ID,
        environment.NODE,
        environment.NODE_INDEX,
        environment.ADDRESS,
        environment.GRACE_SECONDS,
    }
    assert needed <= names
    assert {name for name in names if name.startswith("HOLDFAST_")} == needed


@pytest.mark.parametrize(("layers", "off"), [("both", True), ("in_process", True), ("in_job", False)])
def test_nvls_is_off_only_with_the_in_process_layer(
    recipe: JobConfig, outputs: StackOutputs, layers: Any, off: bool
) -> None:
    recovery = dataclasses.replace(recipe.recovery, layers=layers)
    run = make_run(dataclasses.replace(recipe, recovery=recovery), "", outputs)
    assert ("NCCL_NVLS_ENABLE" in {variable["name"] for variable in trainer(run)["env"]}) is off


def test_huge_pages_are_asked_for_only_on_request(make: MakeRun) -> None:
    without, with_pages = trainer(make()), trainer(make(kubernetes={"hugepages_mib": 5120}))
    assert "hugepages-2Mi" not in without["resources"]["limits"]
    assert {"name": "FI_EFA_USE_HUGE_PAGE", "value": "0"} in without["env"]
    assert with_pages["resources"]["limits"]["hugepages-2Mi"] == "5120Mi"
    assert "FI_EFA_USE_HUGE_PAGE" not in {variable["name"] for variable in with_pages["env"]}


def test_rendering_twice_gives_the_same_bytes(make: MakeRun) -> None:
    assert render(make()) == render(make())


@pytest.mark.parametrize(
    "change",
    [
        {"text": "version = 1 # changed\n"},
        {"trainer_image": "registry.example/trainer:2"},
        {"job": {"nodes": 1}},
        {"kubernetes": {"queue": "team-a"}},
    ],
)
def test_any_change_makes_another_job(make: MakeRun, change: dict[str, Any]) -> None:
    assert job_name(make(**change)) != job_name(make())


def test_run_directory_is_kept_when_the_job_is_another(make: MakeRun) -> None:
    assert make(job={"nodes": 1}).directory == make().directory == "/fsx/runs/llama3-8b"


def test_yaml_reads_back_as_the_objects(make: MakeRun) -> None:
    run = make(text="# a comment\nversion = 1\n")
    assert list(yaml.safe_load_all(render(run, with_prerequisites=True))) == [
        *prerequisites(run),
        *job_objects(run),
    ]


@pytest.mark.parametrize("kind", JOB_KINDS)
def test_commands_are_ones_that_training_takes(make: MakeRun, kind: Any) -> None:
    for spec in pod_specs(job_objects(make(), kind)):
        _, _, program, command, *arguments = spec["containers"][0]["command"]
        assert program == "training"
        asked = [sys.executable, "-m", "training", command, "--help"]
        text = subprocess.run(asked, capture_output=True, text=True, check=True, timeout=100, cwd=ROOT).stdout
        flags = {argument for argument in arguments if argument.startswith("--")}
        assert flags <= set(re.findall(r"--[a-z-]+", text))


def test_prerequisites_are_what_the_job_names(make: MakeRun) -> None:
    run = make()
    made = {(manifest["kind"], manifest["metadata"]["name"]) for manifest in prerequisites(run)}
    assert {
        ("Namespace", run.outputs.namespace),
        ("ServiceAccount", run.outputs.training_service_account),
        ("ServiceAccount", run.outputs.control_service_account),
        ("PersistentVolumeClaim", run.outputs.persistent_volume_claim),
    } <= made
