"""What CloudFormation would refuse, found by cfn-lint: the app itself leaves CDK's slower copy off."""

from __future__ import annotations

import json
import subprocess
import sys

import pytest

from tests.stacks.conftest import Deployment

# W3005: CDK writes DependsOn beside references that imply it. W3010: literal zones are the point:
# a reservation, the nodes and the file system share one, and `Fn::GetAZs` cannot name it.
IGNORED = ["W3005", "W3010"]
EMPTY = "[]"


@pytest.mark.parametrize("variant", ["default", "everything"])
def test_cfn_lint_finds_nothing(variant: str, request: pytest.FixtureRequest) -> None:
    # GIVEN
    deployment: Deployment = request.getfixturevalue(variant)
    templates = sorted(str(path) for path in deployment.folder.glob("*.template.json"))

    # WHEN
    command = [sys.executable, "-m", "cfnlint", "--format", "json", "--regions", deployment.config.region]
    done = subprocess.run(
        [*command, "--ignore-checks", *IGNORED, "--template", *templates], capture_output=True, text=True
    )

    # THEN
    found = json.loads(done.stdout or EMPTY)
    assert [f"{f['Rule']['Id']} {f['Location']['Path']}: {f['Message']}" for f in found] == []
    assert done.returncode == 0, done.stderr
    assert len(templates) == 3


@pytest.mark.parametrize("stack", ["network", "storage", "cluster"])
def test_template_fits_into_cloudformation(default: Deployment, stack: str) -> None:
    size = (default.folder / f"holdfast-{stack}.template.json").stat().st_size

    assert size < 1_000_000
    assert len(default.template(stack).resources) < 500
