"""Write the in-cluster software as YAML, for clusters whose manifests come from Git.

cdk deploy --all --outputs-file outputs.json     with in_cluster_software = "render" in cdk.json
python -m stacks.render outputs.json             writes k8s/generated-cluster/*.yaml
kubectl apply -f k8s/generated-cluster/
"""

from __future__ import annotations

import argparse
import json
import sys
from collections.abc import Sequence
from pathlib import Path

import yaml

from k8s.outputs import load_outputs
from stacks.config import ClusterConfig, from_context
from stacks.manifests import ClusterValues, manifest_groups
from training.errors import ConfigError, HoldfastError

ROOT = Path(__file__).resolve().parent.parent


def main(arguments: Sequence[str] | None = None) -> int:
    """Write one file a group and print their names; return the exit code."""
    parser = argparse.ArgumentParser(
        prog="stacks.render", description="Write the in-cluster software as YAML."
    )
    parser.add_argument("outputs", type=Path, help="what `cdk deploy --outputs-file` wrote")
    parser.add_argument("--cdk-json", type=Path, default=ROOT / "cdk.json", help="the cluster's settings")
    parser.add_argument("--into", type=Path, default=ROOT / "k8s" / "generated-cluster", help="folder")
    options = parser.parse_args(arguments)
    try:
        written = write(read_config(options.cdk_json), options.outputs, options.into)
    except HoldfastError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    sys.stdout.writelines(f"{path}\n" for path in written)
    return 0


def read_config(cdk_json: Path) -> ClusterConfig:
    """Read the `cluster` context of a cdk.json file."""
    try:
        context = json.loads(cdk_json.read_text())["context"]
    except (OSError, ValueError, KeyError) as error:
        rule = f"has no readable context ({error})"
        raise ConfigError.of("--cdk-json", str(cdk_json), rule, "give the cluster's cdk.json") from error
    return from_context(context.get("cluster"))


def write(config: ClusterConfig, outputs: Path, folder: Path) -> list[Path]:
    """Write the manifests of the deployed stacks into `folder`, numbered in the order to apply them."""
    folder.mkdir(parents=True, exist_ok=True)
    groups = manifest_groups(config, _values(outputs))
    written = []
    for number, (name, manifests) in enumerate(groups.items()):
        path = folder / f"{number}-{name}.yaml"
        path.write_text(yaml.dump_all(manifests, Dumper=_Dumper, sort_keys=False))
        written.append(path)
    return written


class _Dumper(yaml.SafeDumper):
    """Writes what is shared as often as it occurs: people read and diff these files."""

    def ignore_aliases(self, data: object) -> bool:
        return True


def _values(outputs: Path) -> ClusterValues:
    stack = load_outputs(outputs)
    return ClusterValues(
        region=stack.region,
        url_suffix="amazonaws.com.cn" if stack.region.startswith("cn-") else "amazonaws.com",
        file_system_id=stack.file_system_id,
        file_system_dns_name=stack.file_system_dns_name,
        file_system_mount_name=stack.file_system_mount_name,
    )


if __name__ == "__main__":
    sys.exit(main())
