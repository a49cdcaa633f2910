"""The Kubernetes API, through kubectl.

kubectl and not the Python client: whoever works with EKS has it, with contexts and `aws eks get-token`
set up; in a pod it finds the service account by itself; and the client (37.0.2 needs python-dateutil 3)
cannot be installed beside the AWS SDK (botocore needs python-dateutil 2).
"""

from __future__ import annotations

import json
import os
import re
import subprocess
import tempfile
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

from training.errors import RunError

_LOG_LINE = re.compile(r"[IWEF]\d{4} [\d:.]+ ")  # klog's, such as a try again of discovery


@dataclass(frozen=True, kw_only=True, slots=True)
class Kubectl:
    """kubectl with a context and a namespace; every method raises `RunError` where the API refuses."""

    namespace: str
    context: str = ""
    """Context of the kubeconfig; empty for the current one."""

    def get(self, kind: str, name: str) -> dict[str, Any] | None:
        """Return an object, or None where there is none."""
        text = self.run("get", kind, name, "--ignore-not-found", "--output=json")
        return json.loads(text) if text else None

    def list_objects(self, kind: str, *, selector: str = "") -> list[dict[str, Any]]:
        """Return the objects of a kind that match a label selector."""
        text = self.run("get", kind, f"--selector={selector}", "--output=json")
        return list(json.loads(text)["items"])

    def apply(self, manifests: str, *, dry_run: bool = False) -> str:
        """Apply YAML and return what happened, an object a line.

        Args:
            manifests: YAML documents.
            dry_run: Let the server check and admit them, and store nothing.
        """
        arguments = ["--dry-run=server"] if dry_run else []
        return self.run("apply", "--filename=-", *arguments, stdin=manifests)

    def patch(self, kind: str, name: str, change: dict[str, Any]) -> None:
        """Merge `change` into an object."""
        self.run("patch", kind, name, "--type=merge", f"--patch={json.dumps(change)}")

    def patch_all(self, manifests: str, change: dict[str, Any]) -> None:
        """Merge `change` into each of the objects that the YAML names."""
        self.run("patch", "--filename=-", "--type=merge", f"--patch={json.dumps(change)}", stdin=manifests)

    def run(self, *arguments: str, stdin: str = "", request_timeout: str = "60s") -> str:
        """Run kubectl and return what it prints.

        Args:
            arguments: Verb and what follows it.
            stdin: Its standard input.
            request_timeout: Longest time of one request, a watch included; "0" for none.
        """
        command = [*self.command(*arguments), f"--request-timeout={request_timeout}"]
        try:
            done = subprocess.run(command, input=stdin, capture_output=True, text=True)
        except FileNotFoundError as error:
            raise _missing() from error
        if done.returncode:
            raise RunError(f"kubectl {arguments[0]}: {_reason(done.stderr)}")
        return done.stdout

    def stream(self, *arguments: str) -> Iterator[str]:
        """Run kubectl without a time limit and yield its lines as they come."""
        command = self.command(*arguments)
        # a file: nobody reads a second pipe meanwhile, and a full one would stop kubectl
        with tempfile.TemporaryFile("w+") as errors:
            try:
                process = subprocess.Popen(command, stdout=subprocess.PIPE, stderr=errors, text=True)
            except FileNotFoundError as error:
                raise _missing() from error
            with process:
                assert process.stdout is not None
                try:
                    yield from process.stdout
                finally:
                    process.terminate()
            if process.returncode > 0:
                errors.seek(0)
                raise RunError(f"kubectl {arguments[0]}: {_reason(errors.read())}")

    def command(self, *arguments: str) -> list[str]:
        scope = [f"--namespace={self.namespace}"] if self.namespace else []
        context = [f"--context={self.context}"] if self.context else []
        return [os.environ.get("KUBECTL", "kubectl"), *arguments, *scope, *context]


def _reason(stderr: str) -> str:
    """Return kubectl's message without its log lines and prefix, and what to do where it can't connect."""
    said = "\n".join(line for line in stderr.splitlines() if not _LOG_LINE.match(line))
    message = said.strip().removeprefix("Error from server ").removeprefix("error: ")
    unreachable = ("Unable to connect", "connection refused", "connection to the server", "no configuration")
    if any(text in message for text in unreachable):
        return f"{message}; run `aws eks update-kubeconfig --name CLUSTER`, or choose --context"
    return message or "failed without a message"


def _missing() -> RunError:
    return RunError("kubectl: not found; install it (https://kubernetes.io/docs/tasks/tools) or set KUBECTL")
