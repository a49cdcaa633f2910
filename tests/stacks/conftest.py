from __future__ import annotations

import copy
import json
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import aws_cdk as cdk
import pytest

from stacks.app import Stacks, add_stacks
from stacks.config import ClusterConfig, from_context
from stacks.review import review
from tests.eks_training.template import Synthesised

ROOT = Path(__file__).parents[2]
CONTEXT: dict[str, Any] = json.loads((ROOT / "cdk.json").read_text())["context"]

Changes = dict[str, Any]
VARIANTS: dict[str, Changes] = {
    "default": {},
    "rendered": {"in_cluster_software": "render", "build_images": False},
    "larger": {"in_cluster_software": "render", "build_images": False, "gpu": {"nodes": 4}},
    "everything": {
        "account": "111122223333",
        "access": {"endpoint": "private", "public_cidrs": []},
        "network": {"interface_endpoints": True},
        "storage": {"data_repository": {"prefix": "corpus"}},
        "operations": {"alarm_email": "oncall@example.com"},
        "gpu": {
            "spares": 0,
            "ami_id": "ami-0123456789abcdef0",
            "capacity": {
                "mode": "capacity-block",
                "reservation_id": "cr-0123456789abcdef0",
                "end": "2026-12-14T11:30:00Z",
            },
        },
    },
    "existing": {
        "in_cluster_software": "render",
        "build_images": False,
        "network": {
            "existing": {
                "vpc_id": "vpc-0123456789abcdef0",
                "training_subnet_id": "subnet-0aaaaaaaaaaaaaaaa",
                "control_plane_subnet_ids": ["subnet-0aaaaaaaaaaaaaaaa", "subnet-0bbbbbbbbbbbbbbbb"],
            }
        },
    },
}


def merged(base: Changes, changes: Changes) -> Changes:
    result = copy.deepcopy(base)
    for key, value in changes.items():
        nested = isinstance(value, dict) and isinstance(result.get(key), dict)
        result[key] = merged(result[key], value) if nested else value
    return result


class Deployment:
    """One synthesised app."""

    def __init__(self, changes: Changes, folder: Path) -> None:
        self.folder = folder
        self.config: ClusterConfig = from_context(merged(CONTEXT["cluster"], changes))
        app = cdk.App(context=CONTEXT, outdir=str(folder), builtin_cloud_formation_validation=False)
        self.stacks: Stacks = add_stacks(app, self.config)
        review(app, self.stacks, self.config)
        app.synth()

    def template(self, stack: str) -> Synthesised:
        path = self.folder / f"{self.config.name}-{stack}.template.json"
        return Synthesised(json.loads(path.read_text()))

    @property
    def network(self) -> Synthesised:
        return self.template("network")

    @property
    def storage(self) -> Synthesised:
        return self.template("storage")

    @property
    def cluster(self) -> Synthesised:
        return self.template("cluster")


@pytest.fixture(scope="session")
def deployments(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str], Deployment]:
    """Every variant, built at its first use and once a session: each takes seconds."""

    @cache
    def build(variant: str) -> Deployment:
        return Deployment(VARIANTS[variant], tmp_path_factory.mktemp(variant))

    return build


@pytest.fixture(scope="session")
def default(deployments: Callable[[str], Deployment]) -> Deployment:
    """What cdk.json deploys."""
    return deployments("default")


@pytest.fixture(scope="session")
def rendered(deployments: Callable[[str], Deployment]) -> Deployment:
    return deployments("rendered")


@pytest.fixture(scope="session")
def larger(deployments: Callable[[str], Deployment]) -> Deployment:
    """`rendered` with two nodes more."""
    return deployments("larger")


@pytest.fixture(scope="session")
def everything(deployments: Callable[[str], Deployment]) -> Deployment:
    return deployments("everything")


@pytest.fixture(scope="session")
def existing(deployments: Callable[[str], Deployment]) -> Deployment:
    return deployments("existing")
