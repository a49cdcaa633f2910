from __future__ import annotations

import dataclasses

import boto3
import pytest

from k8s.before_deploy import Account
from k8s.doctor import check_fit, load_cluster, run_checks
from stacks.config import ClusterConfig
from tests.k8s.conftest import ROOT
from training.config import JobConfig


@pytest.fixture
def config() -> ClusterConfig:
    return load_cluster(ROOT / "cdk.json")


def test_a_recipe_that_the_cluster_will_run(config: ClusterConfig, recipe: JobConfig) -> None:
    (finding,) = check_fit(recipe, config)
    assert (finding.level, finding.message[:5]) == ("OK", "fits:")


def test_a_recipe_that_is_too_large_is_known_before_the_deploy(
    config: ClusterConfig, recipe: JobConfig
) -> None:
    large = dataclasses.replace(recipe, job=dataclasses.replace(recipe.job, nodes=16, ranks_per_node=4))
    assert [(finding.level, finding.message, finding.fix) for finding in check_fit(large, config)] == [
        (
            "FAIL",
            "job.ranks_per_node=4: must be the 8 GPUs of p5.48xlarge: a pod takes a whole node",
            "set it to 8",
        ),
        (
            "FAIL",
            "job.nodes=16: with 0 spares, must be within the cluster's 3 p5.48xlarge nodes",
            "lower it, or deploy more nodes",
        ),
    ]


def test_what_all_checks_lack_is_said_once(config: ClusterConfig, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY", "AWS_PROFILE"):
        monkeypatch.delenv(name, raising=False)
    monkeypatch.setenv("AWS_EC2_METADATA_DISABLED", "true")
    monkeypatch.setenv("AWS_SHARED_CREDENTIALS_FILE", "none")
    blind = run_checks(Account(config=config, session=boto3.Session()).checks())
    assert [f.message for f in blind if f.level == "WARN"] == ["could not look: Unable to locate credentials"]
