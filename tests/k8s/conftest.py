"""A recipe and a cluster to render from."""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from k8s.examples import P5_RECIPE, SAMPLE_OUTPUTS
from k8s.outputs import StackOutputs, load_outputs
from k8s.run import Run, make_run
from training.config import JobConfig, load_recipe

ROOT = Path(__file__).parents[2]
MakeRun = Callable[..., Run]


@pytest.fixture
def outputs() -> StackOutputs:
    return load_outputs(SAMPLE_OUTPUTS)


@pytest.fixture
def recipe() -> JobConfig:
    return load_recipe(P5_RECIPE)


@pytest.fixture
def make(recipe: JobConfig, outputs: StackOutputs) -> MakeRun:
    """Return a function that makes a run: `kubernetes` and `job` override fields of those sections."""

    def make_with(
        *,
        text: str = "version = 1\n",
        kubernetes: dict[str, Any] | None = None,
        job: dict[str, Any] | None = None,
        **cluster: Any,
    ) -> Run:
        config = dataclasses.replace(
            recipe,
            kubernetes=dataclasses.replace(recipe.kubernetes, **(kubernetes or {})),
            job=dataclasses.replace(recipe.job, **(job or {})),
        )
        return make_run(config, text, dataclasses.replace(outputs, **cluster))

    return make_with


@pytest.fixture
def kubectl_answers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Return a function that says what `kubectl get KIND` prints; other kinds are forbidden."""
    program = tmp_path / "kubectl"
    program.write_text(
        f'''#!/bin/sh
if [ "$1" = get ] && [ -e "{tmp_path}/$2.json" ]; then exec cat "{tmp_path}/$2.json"; fi
echo "Error from server (Forbidden): $2 is forbidden" >&2
exit 1
'''
    )
    program.chmod(0o755)
    monkeypatch.setenv("KUBECTL", str(program))

    def answer(kind: str, printed: dict[str, Any]) -> None:
        (tmp_path / f"{kind}.json").write_text(json.dumps(printed))

    return answer
