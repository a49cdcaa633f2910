"""kubectl for a machine without an API server: checks manifests by schema and records them.

python -m tests.deploy.recording_kubectl RECORDS apply|create|delete --kubeconfig FILE -f FILE ...
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import kubernetes_validate

from tests.deploy.in_cluster import record_path

_KUBERNETES = "1.36"


def main(records: str, verb: str, *options: str) -> None:
    """Record or forget the objects of the file that `-f` names."""
    manifests = Path(options[options.index("-f") + 1]).read_text()
    for manifest in _objects(manifests):
        metadata = manifest["metadata"]
        record = record_path(
            Path(records),
            kind=manifest["kind"],
            name=metadata["name"],
            namespace=metadata.get("namespace", ""),
        )
        if verb == "delete":
            record.unlink(missing_ok=True)
        else:
            kubernetes_validate.validate(manifest, _KUBERNETES, strict=True)
            record.write_text(json.dumps(manifest))


def _objects(text: str) -> Iterator[dict[str, Any]]:
    # JSON objects one after the other, as CDK's handler writes them
    decoder, position = json.JSONDecoder(), 0
    while position < len(text):
        manifest, position = decoder.raw_decode(text, position)
        yield manifest


if __name__ == "__main__":
    main(*sys.argv[1:])
