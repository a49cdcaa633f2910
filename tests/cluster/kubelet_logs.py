"""The part of a kubelet that serves container logs to the API server."""

from __future__ import annotations

import ssl
import threading
from http.server import BaseHTTPRequestHandler, ThreadingHTTPServer
from pathlib import Path
from types import TracebackType
from typing import Self


class _Handler(BaseHTTPRequestHandler):
    def do_GET(self) -> None:
        # /containerLogs/NAMESPACE/POD/CONTAINER?follow=...
        _, _, _, pod, container = self.path.partition("?")[0].split("/")
        body = f"{pod} {container} was asked\n".encode()
        self.send_response(200)
        self.send_header("Content-Length", str(len(body)))
        self.end_headers()
        self.wfile.write(body)

    def log_message(self, format: str, *args: object) -> None:
        """Keep the tests' output clean."""


class LogServer:
    """Answers every request for a log with the pod and the container that it was for."""

    def __init__(self, directory: Path) -> None:
        """Prepare a server with the API server's own certificate, found in `directory`."""
        context = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
        context.load_cert_chain(directory / "apiserver.crt", directory / "apiserver.key")
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), _Handler)
        self._server.socket = context.wrap_socket(self._server.socket, server_side=True)
        self._thread = threading.Thread(target=self._server.serve_forever, name="kubelet-logs")

    @property
    def port(self) -> int:
        return int(self._server.server_address[1])

    def __enter__(self) -> Self:
        self._thread.start()
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join()
