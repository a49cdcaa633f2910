from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import pytest
import yaml

from k8s.__main__ import COMMANDS, main
from k8s.examples import P5_RECIPE, SAMPLE_OUTPUTS
from tests.k8s.conftest import ROOT


def k8s(*arguments: str | Path) -> subprocess.CompletedProcess[str]:
    command = [sys.executable, "-m", "k8s", *map(str, arguments)]
    return subprocess.run(command, capture_output=True, text=True, cwd=ROOT, timeout=60)


def test_render_writes_manifests_for_kubectl() -> None:
    done = k8s("render", P5_RECIPE, "--outputs", SAMPLE_OUTPUTS)
    assert done.returncode == 0
    kinds = [manifest["kind"] for manifest in yaml.safe_load_all(done.stdout)]
    assert kinds.count("Job") == 2
    assert "Namespace" not in kinds


def test_render_can_include_what_the_stacks_make() -> None:
    done = k8s("render", P5_RECIPE, "--outputs", SAMPLE_OUTPUTS, "--with-prerequisites")
    kinds = {manifest["kind"] for manifest in yaml.safe_load_all(done.stdout)}
    assert {"Namespace", "ServiceAccount", "PersistentVolume", "PersistentVolumeClaim"} <= kinds


def test_render_needs_no_torch_and_no_kubernetes_client() -> None:
    program = (
        "import sys; sys.argv = ['k8s']; from k8s.__main__ import main;"
        f"code = main(['render', {str(P5_RECIPE)!r}, '--outputs', {str(SAMPLE_OUTPUTS)!r}]);"
        "heavy = {'torch', 'kubernetes', 'boto3', 'aws_cdk'} & set(sys.modules);"
        "sys.exit(f'imported {heavy}' if heavy else code)"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True, cwd=ROOT)
    assert done.returncode == 0, done.stderr


def test_examples_are_written_by_the_command_that_their_test_names(tmp_path: Path) -> None:
    # in a copy: it writes into its own folder
    for name in ("k8s", "training", "constructs"):
        shutil.copytree(ROOT / name, tmp_path / name, ignore=shutil.ignore_patterns("__pycache__"))
    shutil.rmtree(tmp_path / "k8s" / "generated")
    command = [sys.executable, "-m", "k8s.examples"]
    subprocess.run(command, cwd=tmp_path, check=True, timeout=60)
    written = sorted(path.name for path in (tmp_path / "k8s" / "generated").iterdir())
    assert written == sorted(path.name for path in (ROOT / "k8s" / "generated").iterdir())


def test_bad_input_is_one_line_and_exit_code_64(tmp_path: Path) -> None:
    done = k8s("render", tmp_path / "none.toml", "--outputs", SAMPLE_OUTPUTS)
    assert done.returncode == 64
    assert done.stderr.startswith("error: RECIPE=")
    assert "Traceback" not in done.stderr


def test_unknown_command_gets_a_suggestion() -> None:
    done = k8s("rendr")
    assert done.returncode == 64
    assert "did you mean 'render'?" in done.stderr


@pytest.mark.parametrize("command", sorted(COMMANDS))
def test_wrong_arguments_are_one_line_and_exit_code_64(
    command: str, capsys: pytest.CaptureFixture[str]
) -> None:
    # doctor's own exit code 2 means something else
    assert main([command, "--no-such-option"]) == 64
    usage, *_, message = capsys.readouterr().err.splitlines()
    assert usage.startswith(f"usage: python -m k8s {command} ")
    assert message.startswith(f"python -m k8s {command}: error: ")


def test_help_lists_the_commands() -> None:
    done = k8s("--help")
    assert done.returncode == 0
    assert {"doctor", "render", "submit", "status", "logs", "delete", "cost"} <= set(done.stdout.split())


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["cost", "--gpu-hour", "-3"], "argument --gpu-hour: '-3' must be a number above 0"),
        (["cost", "--gpu-hour", "nan"], "argument --gpu-hour: 'nan' must be a number above 0"),
        (["doctor", "--step-seconds", "0"], "argument --step-seconds: '0' must be a number above 0"),
        (["publish", "--period-seconds", "-1"], "argument --period-seconds: '-1' must be a number above 0"),
        (["doctor", "--smoke"], "error: --smoke: needs RECIPE and --outputs; give the recipe"),
        (["doctor", "--cluster", "FILE"], "has no `context` table; give cdk.json"),
        (["cost", "--cluster", "FILE"], "has no `context` table; give cdk.json"),
        (["cost", "--goodput", "FILE"], "is no goodput report; write it with"),
    ],
)
def test_mistakes_are_named(
    arguments: list[str], message: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    file = tmp_path / "file.json"
    file.write_text("[]")
    assert main([str(file) if argument == "FILE" else argument for argument in arguments]) == 64
    assert message in capsys.readouterr().err
