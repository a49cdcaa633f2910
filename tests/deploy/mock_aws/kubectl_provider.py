"""Run CDK's kubectl handler, the code that the deploy uploaded, outside Lambda."""

from __future__ import annotations

import io
import json
import os
import subprocess
import sys
import tempfile
import zipfile
from pathlib import Path
from typing import Any

TOOLS_VARIABLE = "HOLDFAST_REHEARSAL_TOOLS"
"""Folder with the `aws` and `kubectl` that the handler finds in PATH."""

_RUN = "import json, sys; import index; index.handler(json.load(sys.stdin), None)"
_SECONDS = 60


def handle(event: dict[str, Any], *, code: bytes) -> None:
    """Handle one event of CloudFormation.

    Raises:
        RuntimeError: The handler failed; the message is the end of its output.
    """
    with tempfile.TemporaryDirectory() as folder:
        with zipfile.ZipFile(io.BytesIO(code)) as archive:
            archive.extractall(folder)
        environment = {
            **os.environ,
            "PATH": f"{os.environ[TOOLS_VARIABLE]}:{os.environ['PATH']}",
            # where the handler writes kubeconfig and manifests
            "TEST_OUTDIR": folder,
        }
        done = subprocess.run(
            [sys.executable, "-c", _RUN],
            cwd=Path(folder),
            env=environment,
            input=json.dumps(event),
            capture_output=True,
            text=True,
            timeout=_SECONDS,
            check=False,
        )
    if done.returncode:
        raise RuntimeError(f"kubectl handler: {done.stderr[-2000:]}")
