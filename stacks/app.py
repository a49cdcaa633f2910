"""The three stacks of one cluster."""

from __future__ import annotations

from dataclasses import dataclass

import aws_cdk as cdk

from stacks.cluster import ClusterStack
from stacks.config import ClusterConfig
from stacks.network import NetworkStack
from stacks.storage import StorageStack
from stacks.tags import tags


@dataclass(frozen=True, kw_only=True, slots=True)
class Stacks:
    """What one app deploys, in that order."""

    network: NetworkStack
    storage: StorageStack
    cluster: ClusterStack


def add_stacks(app: cdk.App, config: ClusterConfig) -> Stacks:
    """Add the stacks of `config` to `app`."""
    environment = cdk.Environment(account=config.account or None, region=config.region)
    network = NetworkStack(app, f"{config.name}-network", config=config, env=environment)
    storage = StorageStack(app, f"{config.name}-storage", config=config, network=network, env=environment)
    cluster = ClusterStack(
        app, f"{config.name}-cluster", config=config, network=network, storage=storage, env=environment
    )
    for key, value in tags(config).items():
        cdk.Tags.of(app).add(key, value)
    # CDK keeps the logs of its own functions for two years, and leaves them behind
    cdk.RemovalPolicies.of(app).destroy(apply_to_resource_types=["AWS::Logs::LogGroup"])
    return Stacks(network=network, storage=storage, cluster=cluster)
