"""One account for the whole folder, and the operator's steps in it, each once and in their order."""

from __future__ import annotations

import copy
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.deploy.account import ACCOUNT, REGION, Account
from tests.deploy.cdk_cli import CdkCli, Finished, cluster_settings
from tests.deploy.in_cluster import InCluster, in_cluster
from tests.deploy.inventory import inventory
from tests.deploy.stacks import Change, StackChanges


@pytest.fixture(scope="session")
def tools(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("tools")


@pytest.fixture(scope="session")
def objects(tmp_path_factory: pytest.TempPathFactory, tools: Path) -> Iterator[InCluster]:
    """What is in the Kubernetes cluster."""
    with in_cluster(tmp_path_factory.mktemp("objects"), tools) as found:
        yield found


@pytest.fixture(scope="session")
def account(tmp_path_factory: pytest.TempPathFactory, tools: Path, objects: InCluster) -> Iterator[Account]:
    with Account(tmp_path_factory.mktemp("account"), tools=tools) as running:
        yield running
        running.check()


@pytest.fixture(scope="session")
def cdk(tmp_path_factory: pytest.TempPathFactory, account: Account) -> CdkCli:
    return CdkCli(tmp_path_factory.mktemp("cdk"), environment=account.environment)


@pytest.fixture(scope="session")
def bootstrapped(cdk: CdkCli) -> Finished:
    return cdk.bootstrap(f"aws://{ACCOUNT}/{REGION}")


@pytest.fixture(scope="session")
def before(account: Account, bootstrapped: Finished) -> set[str]:
    """What the account held before the first deploy."""
    return inventory(account)


@pytest.fixture(scope="session")
def failed_deploy(account: Account, cdk: CdkCli, before: set[str]) -> Finished:
    """Return a deploy whose Auto Scaling group could not be made."""
    account.fail_to_create("AWS::AutoScaling::AutoScalingGroup")
    finished = cdk.deploy(cluster_settings())
    account.fail_to_create()
    return finished


@pytest.fixture(scope="session")
def deployed(cdk: CdkCli, failed_deploy: Finished) -> Finished:
    """Return the deploy after it, with nothing in its way."""
    return cdk.deploy(cluster_settings())


@pytest.fixture(scope="session")
def changes_of_same_deploy(account: Account, cdk: CdkCli, deployed: Finished) -> list[Change]:
    changes = StackChanges(account)
    finished = cdk.deploy(cluster_settings())
    assert finished.code == 0, finished.text
    return changes.since_then()


@pytest.fixture(scope="session")
def changes_of_third_node(
    account: Account, cdk: CdkCli, changes_of_same_deploy: list[Change]
) -> list[Change]:
    changes = StackChanges(account)
    settings = copy.deepcopy(cluster_settings())
    settings["gpu"]["nodes"] = 3
    finished = cdk.deploy(settings)
    assert finished.code == 0, finished.text
    return changes.since_then()


@pytest.fixture(scope="session")
def destroyed(cdk: CdkCli, changes_of_third_node: list[Change]) -> Finished:
    return cdk.destroy(cluster_settings())
