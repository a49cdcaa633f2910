"""An AWS account on this machine: moto's server in a process of its own, and how to reach it."""

from __future__ import annotations

import os
import stat
import sys
import time
import urllib.error
import urllib.request
from collections.abc import Mapping
from pathlib import Path
from types import TracebackType
from typing import Any, Self

import boto3

from tests.cluster.servers import Server, free_port
from tests.deploy.mock_aws.kubectl_provider import TOOLS_VARIABLE

ACCOUNT = "123456789012"
REGION = "us-west-2"

_ROOT = Path(__file__).resolve().parents[2]
_START_SECONDS = 60


class Account:
    """Starts on entering, stops on leaving; everything it writes lies in one directory."""

    def __init__(self, directory: Path, *, tools: Path) -> None:
        """Prepare an account.

        Args:
            directory: Empty directory for logs and settings.
            tools: Folder with the `aws` and `kubectl` that the kubectl provider calls.
        """
        self._directory = directory
        self._failures = directory / "failures"
        self._tools = tools
        self._port = free_port()

    def __enter__(self) -> Self:
        program = self._directory / "mock-aws"
        environment = " ".join(f"{key}='{value}'" for key, value in self.environment.items())
        program.write_text(
            f"#!/bin/sh\ncd '{_ROOT}'\nexport {environment} {TOOLS_VARIABLE}='{self._tools}'\n"
            f"exec '{sys.executable}' -m tests.deploy.mock_aws \"$@\"\n"
        )
        program.chmod(program.stat().st_mode | stat.S_IXUSR)
        self._server = Server(program, [str(self._port), str(self._failures)], directory=self._directory)
        try:
            self._wait_until_ready()
        except BaseException:
            self._server.stop()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.stop()

    @property
    def environment(self) -> Mapping[str, str]:
        """What programs need to see this account, and no other."""
        return {
            "AWS_ENDPOINT_URL": f"http://127.0.0.1:{self._port}",
            "AWS_ACCESS_KEY_ID": "rehearsal",
            "AWS_SECRET_ACCESS_KEY": "rehearsal",
            "AWS_REGION": REGION,
            "AWS_DEFAULT_REGION": REGION,
            "AWS_CONFIG_FILE": os.devnull,
            "AWS_SHARED_CREDENTIALS_FILE": os.devnull,
            "AWS_EC2_METADATA_DISABLED": "true",
        }

    def client(self, service: str) -> Any:
        """Return a client of boto3."""
        return boto3.client(
            service,
            region_name=REGION,
            endpoint_url=self.environment["AWS_ENDPOINT_URL"],
            aws_access_key_id="rehearsal",
            aws_secret_access_key="rehearsal",
        )

    def fail_to_create(self, *resource_types: str) -> None:
        """Let the creation of these types fail from now on."""
        self._failures.write_text("\n".join(resource_types))

    def check(self) -> None:
        """Raise if the server has ended."""
        self._server.check()

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            self._server.check()
            try:
                urllib.request.urlopen(f"{self.environment['AWS_ENDPOINT_URL']}/moto-api/", timeout=5).close()
            except (urllib.error.URLError, OSError):
                if time.monotonic() > deadline:
                    raise
                time.sleep(0.1)
            else:
                return
