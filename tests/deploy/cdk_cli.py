"""The CDK CLI, as an operator runs it."""

from __future__ import annotations

import copy
import json
import os
import subprocess
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

_ROOT = Path(__file__).resolve().parents[2]
_CDK = _ROOT / "node_modules" / ".bin" / "cdk"
_SECONDS = 240


@dataclass(frozen=True, kw_only=True, slots=True)
class Finished:
    """A command that has ended."""

    code: int
    text: str


class CdkCli:
    """Runs `cdk` in the repository against one account; writes into `directory` alone."""

    def __init__(self, directory: Path, *, environment: Mapping[str, str]) -> None:
        self.outputs = directory / "outputs.json"
        self._directory = directory
        self._environment = {
            # the app is `python3 app.py`
            "PATH": f"{Path(sys.executable).parent}:{os.environ['PATH']}",
            "HOME": str(directory),
            "TMPDIR": str(directory),
            "JSII_SILENCE_WARNING_END_OF_LIFE_NODE_VERSION": "20",
            **environment,
        }

    def run(self, *arguments: str, folder: Path = _ROOT) -> Finished:
        """Run a command in a folder; its output and errors come back as one text."""
        done = subprocess.run(
            [_CDK, "--no-notices", "--no-color", "--ci", *arguments],
            cwd=folder,
            env=self._environment,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
        return Finished(code=done.returncode, text=done.stdout)

    def bootstrap(self, target: str) -> Finished:
        # without an app in the folder, the CLI does not wait for a synth that it has no use for
        return self.run("bootstrap", target, folder=self._directory)

    def deploy(self, settings: Mapping[str, Any]) -> Finished:
        """Deploy all stacks of the app with these settings as its `cluster` context."""
        return self._with_app(
            "deploy", settings, "--require-approval", "never", "--outputs-file", str(self.outputs)
        )

    def destroy(self, settings: Mapping[str, Any]) -> Finished:
        return self._with_app("destroy", settings, "--force")

    def _with_app(self, command: str, settings: Mapping[str, Any], *arguments: str) -> Finished:
        assembly = ["--output", str(self._directory / "cdk.out")]
        return self.run(command, "--all", "-c", f"cluster={json.dumps(settings)}", *assembly, *arguments)


def cluster_settings() -> dict[str, Any]:
    """Return the settings of cdk.json with a pinned image and a bucket.

    The newest image is a public parameter, which moto neither has nor accepts.
    """
    settings: dict[str, Any] = copy.deepcopy(
        json.loads((_ROOT / "cdk.json").read_text())["context"]["cluster"]
    )
    settings["gpu"]["ami_id"] = "ami-0123456789abcdef0"
    settings["storage"]["data_repository"] = {}
    return settings
