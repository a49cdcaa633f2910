"""`cdk synth` as people run it: the real CLI, app.py and cdk.json."""

from __future__ import annotations

import hashlib
import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stacks.conftest import CONTEXT, ROOT, Changes, merged

CLI = ROOT / "node_modules" / ".bin" / "cdk"
APP = (
    "app.py",
    "cdk.json",
    "pyproject.toml",
    "requirements-infra.txt",
    "requirements-training.txt",
    "stacks",
    "constructs",
    "training",
    "k8s",
)
# without an interface, a lookup or a download is an error at once
NO_NETWORK = ["unshare", "--net", "--map-root-user"]

pytestmark = [
    pytest.mark.skipif(not CLI.exists(), reason="needs the CDK CLI: npm ci"),
    pytest.mark.timeout(300),
]


def bare_environment(home: Path) -> dict[str, str]:
    """What `env -i` leaves, and the programs that the app needs."""
    node = shutil.which("node")
    assert node is not None
    path = f"{Path(sys.executable).parent}:{Path(node).parent}:/usr/bin:/bin"
    return {"PATH": path, "HOME": str(home), "TMPDIR": str(home)}


@pytest.fixture(scope="module")
def project(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A copy of the project: nothing may depend on where it lies, and nobody edits it meanwhile."""
    folder = tmp_path_factory.mktemp("project")
    for source in (ROOT / name for name in APP if (ROOT / name).exists()):
        if source.is_dir():
            shutil.copytree(source, folder / source.name, ignore=shutil.ignore_patterns("__pycache__"))
        else:
            shutil.copyfile(source, folder / source.name)
    return folder


def synth(project: Path, out: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    command = [str(CLI), "synth", "--quiet", "--no-lookups", "--no-notices", "--output", str(out)]
    return subprocess.run(
        [*NO_NETWORK, *command, *arguments],
        cwd=project,
        # one home for all runs: jsii unpacks its packages into it once
        env=bare_environment(project.parent),
        capture_output=True,
        text=True,
        check=False,
    )


def digests(folder: Path) -> dict[str, str]:
    """Return a digest of every file; performance counters are times and no part of the deployment."""
    return {
        str(path.relative_to(folder)): hashlib.sha256(path.read_bytes()).hexdigest()
        for path in sorted(folder.rglob("*"))
        if path.is_file() and path.name != "performance-counters.json"
    }


def test_synth_needs_neither_network_nor_credentials_and_repeats_itself(
    project: Path, tmp_path: Path
) -> None:
    # WHEN
    first = synth(project, tmp_path / "first")
    second = synth(project, tmp_path / "second")

    # THEN
    assert (first.returncode, second.returncode) == (0, 0), first.stderr
    assert digests(tmp_path / "first") == digests(tmp_path / "second")
    manifest = json.loads((tmp_path / "first" / "manifest.json").read_text())
    assert "missing" not in manifest


def context(changes: Changes) -> str:
    return json.dumps(merged(CONTEXT["cluster"], changes))


def test_wrong_settings_are_one_message_a_field(project: Path, tmp_path: Path) -> None:
    # GIVEN
    changes = {"storage": {"capacity_gib": 3600}, "gpu": {"instance_type": "p5.48xlage"}}

    # WHEN
    done = synth(project, tmp_path / "out", "--context", f"cluster={context(changes)}")

    # THEN
    assert done.returncode != 0
    text = done.stdout + done.stderr
    assert "cluster.storage.capacity_gib=3600: SCRATCH_2 takes 1200 or a multiple of 2400" in text
    assert "did you mean 'p5.48xlarge'?" in text
    assert "Traceback" not in text


def test_app_exits_with_the_code_of_wrong_settings() -> None:
    # WHEN
    environment = {**os.environ, "CDK_CONTEXT_JSON": json.dumps({"cluster": {"name": "x"}})}
    done = subprocess.run(
        [sys.executable, "app.py"], cwd=ROOT, env=environment, capture_output=True, text=True, check=False
    )

    # THEN
    assert done.returncode == 64
    assert "cluster.region: is required; set it" in done.stderr
