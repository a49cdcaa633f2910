"""What the kubectl provider talks to: a real API server where there is one, else a record of manifests."""

from __future__ import annotations

import json
import os
import shlex
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any, Protocol

from tests.cluster.control_plane import ApiError, ControlPlane
from tests.cluster.servers import FOLDER_VARIABLE

_ROOT = Path(__file__).resolve().parents[2]
_COLLECTIONS = {
    "DaemonSet": "/apis/apps/v1/namespaces/{namespace}/daemonsets",
    "Namespace": "/api/v1/namespaces",
    "PersistentVolume": "/api/v1/persistentvolumes",
    "PersistentVolumeClaim": "/api/v1/namespaces/{namespace}/persistentvolumeclaims",
    "ServiceAccount": "/api/v1/namespaces/{namespace}/serviceaccounts",
}


class InCluster(Protocol):
    """The objects of the cluster."""

    def find(self, kind: str, name: str, *, namespace: str = "") -> dict[str, Any] | None:
        """Return an object, or None where there is none."""
        ...


class ApiObjects:
    """Objects in a real API server."""

    def __init__(self, control_plane: ControlPlane) -> None:
        self._control_plane = control_plane

    def find(self, kind: str, name: str, *, namespace: str = "") -> dict[str, Any] | None:
        collection = _COLLECTIONS[kind].format(namespace=namespace)
        try:
            found: dict[str, Any] = self._control_plane.request("GET", f"{collection}/{name}")
        except ApiError as error:
            if error.code == 404:
                return None
            raise
        return found


class RecordedObjects:
    """Objects that a stand-in for kubectl recorded: valid by schema, admitted by nobody."""

    def __init__(self, records: Path) -> None:
        self._records = records

    def find(self, kind: str, name: str, *, namespace: str = "") -> dict[str, Any] | None:
        record = record_path(self._records, kind=kind, name=name, namespace=namespace)
        return json.loads(record.read_text()) if record.exists() else None


def record_path(records: Path, *, kind: str, name: str, namespace: str) -> Path:
    return records / f"{kind}.{namespace}.{name}.json"


@contextmanager
def in_cluster(directory: Path, tools: Path) -> Iterator[InCluster]:
    """Provide objects; fill `tools` with the `aws` and `kubectl` that reach them."""
    if os.environ.get(FOLDER_VARIABLE):
        with ControlPlane(directory) as control_plane:
            kubeconfig = control_plane.kubeconfig()
            (tools / "kubectl").symlink_to(control_plane.programs["kubectl"])
            _write_update_kubeconfig(tools, kubeconfig)
            yield ApiObjects(control_plane)
            control_plane.check()
        return
    kubeconfig = directory / "kubeconfig"
    kubeconfig.touch()
    _write_update_kubeconfig(tools, kubeconfig)
    command = shlex.join([sys.executable, "-m", "tests.deploy.recording_kubectl", str(directory)])
    _write_script(tools / "kubectl", f'export PYTHONPATH={shlex.quote(str(_ROOT))}\nexec {command} "$@"\n')
    yield RecordedObjects(directory)


def _write_update_kubeconfig(tools: Path, kubeconfig: Path) -> None:
    # aws eks update-kubeconfig --name NAME --kubeconfig FILE
    _write_script(tools / "aws", f'test "$2" = update-kubeconfig && cp {shlex.quote(str(kubeconfig))} "$6"\n')


def _write_script(path: Path, text: str) -> None:
    path.write_text(f"#!/bin/sh\n{text}")
    path.chmod(0o755)
