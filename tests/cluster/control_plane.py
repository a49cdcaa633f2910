"""A real Kubernetes control plane on loopback: etcd, API server, controller manager, scheduler.

Users are told apart by static tokens, so no certificates but the API server's own are needed; a kubelet
of a later test joins with a token of its own (`users`).
"""

from __future__ import annotations

import json
import ssl
import time
import urllib.error
import urllib.request
from contextlib import ExitStack
from pathlib import Path
from types import TracebackType
from typing import Any, Self

from cryptography.hazmat.primitives import serialization
from cryptography.hazmat.primitives.asymmetric import ec

from tests.cluster.servers import Server, find_programs, free_port

ADMIN = "admin"
_USERS = {
    ADMIN: ("admin", "system:masters"),
    "controller-manager": ("system:kube-controller-manager", ""),
    "scheduler": ("system:kube-scheduler", ""),
}
NODE_GRACE_SECONDS = 10
_START_SECONDS = 90


class ApiError(Exception):
    """The API server refused a request."""

    def __init__(self, code: int, message: str) -> None:
        self.code = code
        super().__init__(f"{code}: {message}")


class ControlPlane:
    """Starts on entering, stops on leaving; everything it writes lies in one directory."""

    def __init__(self, directory: Path, *, users: dict[str, tuple[str, str]] | None = None) -> None:
        """Prepare a control plane.

        Args:
            directory: Empty directory for data, logs and credentials.
            users: More users: {token: (user name, group)}.
        """
        self.directory = directory
        self.programs = find_programs()
        self.port = free_port()
        self._users = {**_USERS, **(users or {})}
        self._servers: list[Server] = []
        self._stack = ExitStack()

    @property
    def url(self) -> str:
        return f"https://127.0.0.1:{self.port}"

    @property
    def certificate(self) -> Path:
        return self.directory / "apiserver.crt"

    def __enter__(self) -> Self:
        try:
            self._write_credentials()
            etcd_port = free_port()
            self._start_etcd(etcd_port)
            self._start_api_server(etcd_port)
            self._wait_until_ready()
            self._start_controllers()
        except BaseException:
            self._stack.close()
            raise
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._stack.close()

    def kubeconfig(self, token: str = ADMIN) -> Path:
        """Return a kubeconfig file of the user with this token."""
        path = self.directory / f"{token[:32]}.kubeconfig"
        cluster = {"server": self.url, "certificate-authority": str(self.certificate)}
        config = {
            "apiVersion": "v1",
            "kind": "Config",
            "clusters": [{"name": "test", "cluster": cluster}],
            "users": [{"name": "user", "user": {"token": token}}],
            "contexts": [{"name": "test", "context": {"cluster": "test", "user": "user"}}],
            "current-context": "test",
        }
        path.write_text(json.dumps(config))
        return path

    def request(
        self,
        method: str,
        path: str,
        body: Any = None,
        *,
        content_type: str = "application/json",
        token: str = ADMIN,
    ) -> Any:
        """Send one request to the API and return the decoded answer.

        Raises:
            ApiError: The server refused it.
        """
        data = None if body is None else json.dumps(body).encode()
        headers = {"Authorization": f"Bearer {token}", "Content-Type": content_type}
        request = urllib.request.Request(f"{self.url}{path}", data=data, headers=headers, method=method)
        context = ssl.create_default_context(cafile=str(self.certificate))
        try:
            with urllib.request.urlopen(request, timeout=30, context=context) as answer:
                return json.loads(answer.read() or b"null")
        except urllib.error.HTTPError as error:
            with error:
                raise ApiError(error.code, error.read().decode(errors="replace")) from None

    def merge(self, path: str, change: Any) -> Any:
        """Merge `change` into the object at `path`."""
        return self.request("PATCH", path, change, content_type="application/merge-patch+json")

    def check(self) -> None:
        """Raise if a server has ended."""
        for server in self._servers:
            server.check()

    def _write_credentials(self) -> None:
        rows = [
            f'{token},{name},{token},"{group}"' if group else f"{token},{name},{token}"
            for token, (name, group) in self._users.items()
        ]
        (self.directory / "tokens.csv").write_text("\n".join(rows) + "\n")
        key = ec.generate_private_key(ec.SECP256R1())
        private = key.private_bytes(
            serialization.Encoding.PEM,
            serialization.PrivateFormat.TraditionalOpenSSL,
            serialization.NoEncryption(),
        )
        public = key.public_key().public_bytes(
            serialization.Encoding.PEM, serialization.PublicFormat.SubjectPublicKeyInfo
        )
        (self.directory / "service-accounts.key").write_bytes(private)
        (self.directory / "service-accounts.pub").write_bytes(public)

    def _start_etcd(self, port: int) -> None:
        client, peer = f"http://127.0.0.1:{port}", f"http://127.0.0.1:{free_port()}"
        self._start(
            "etcd",
            "--data-dir=etcd",
            "--unsafe-no-fsync",
            f"--listen-client-urls={client}",
            f"--advertise-client-urls={client}",
            f"--listen-peer-urls={peer}",
            f"--initial-advertise-peer-urls={peer}",
            f"--initial-cluster=default={peer}",
        )

    def _start_api_server(self, etcd_port: int) -> None:
        self._start(
            "kube-apiserver",
            f"--etcd-servers=http://127.0.0.1:{etcd_port}",
            "--bind-address=127.0.0.1",
            "--advertise-address=127.0.0.1",
            # the usual reconciler refuses a loopback address
            "--endpoint-reconciler-type=none",
            f"--secure-port={self.port}",
            f"--cert-dir={self.directory}",
            "--token-auth-file=tokens.csv",
            "--authorization-mode=Node,RBAC",
            "--enable-admission-plugins=NodeRestriction",
            "--allow-privileged",
            "--service-cluster-ip-range=10.96.0.0/16",
            "--service-account-issuer=https://kubernetes.default.svc",
            "--service-account-key-file=service-accounts.pub",
            "--service-account-signing-key-file=service-accounts.key",
        )

    def _start_controllers(self) -> None:
        common = ["--leader-elect=false", "--bind-address=127.0.0.1", f"--cert-dir={self.directory}/serving"]
        self._start(
            "kube-controller-manager",
            *common,
            f"--secure-port={free_port()}",
            f"--kubeconfig={self.kubeconfig('controller-manager')}",
            "--authentication-skip-lookup",
            "--service-account-private-key-file=service-accounts.key",
            f"--root-ca-file={self.certificate}",
            "--use-service-account-credentials",
            f"--node-monitor-grace-period={NODE_GRACE_SECONDS}s",
            "--node-monitor-period=1s",
        )
        self._start(
            "kube-scheduler",
            *common,
            f"--secure-port={free_port()}",
            f"--kubeconfig={self.kubeconfig('scheduler')}",
            "--authentication-skip-lookup",
        )

    def _start(self, program: str, *arguments: str) -> None:
        server = Server(self.programs[program], arguments, directory=self.directory)
        self._servers.append(server)
        self._stack.callback(server.stop)

    def _wait_until_ready(self) -> None:
        deadline = time.monotonic() + _START_SECONDS
        while True:
            self.check()
            try:
                self.request("GET", "/readyz")
            except json.JSONDecodeError:
                return  # "ok" is not JSON
            except (ApiError, OSError) as error:
                if time.monotonic() > deadline:
                    raise TimeoutError(f"API server not ready after {_START_SECONDS} s: {error}") from error
                time.sleep(0.2)
