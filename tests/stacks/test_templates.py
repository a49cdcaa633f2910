"""What CloudFormation would refuse, found by cfn-lint: the app itself leaves CDK's slower copy off."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path

import pytest

from tests.stacks.conftest import Deployment

# W3005: CDK writes DependsOn beside references that imply it. W3010: literal zones are the point:
# a reservation, the nodes and the file system share one, and `Fn::GetAZs` cannot name it.
IGNORED = ["W3005", "W3010"]
LINTER = str(Path(sys.executable).parent / "cfn-lint")


@pytest.mark.parametrize("variant", ["default", "everything"])
def test_cfn_lint_finds_nothing(variant: str, request: pytest.FixtureRequest) -> None:
    # GIVEN
    deployment: Deployment = request.getfixturevalue(variant)
    templates = sorted(str(path) for path in deployment.folder.glob("*.template.json"))

    # WHEN
    done = subprocess.run(
        [
            LINTER,
            "--regions",
            deployment.config.region,
            "--ignore-checks",
            *IGNORED,
            "--template",
            *templates,
        ],
        capture_output=True,
        text=True,
        check=False,
    )

    # THEN
    assert (done.returncode, done.stdout, done.stderr) == (0, "", "")
    assert len(templates) == 3


def test_cfn_lint_would_find_something(tmp_path: Path) -> None:
    # GIVEN
    template = tmp_path / "wrong.template.json"
    template.write_text(json.dumps({"Resources": {"Volume": {"Type": "AWS::EC2::Volum"}}}))

    # WHEN
    done = subprocess.run([LINTER, "--template", str(template)], capture_output=True, text=True, check=False)

    # THEN
    assert done.returncode != 0
    assert "AWS::EC2::Volum" in done.stdout


@pytest.mark.parametrize("stack", ["network", "storage", "cluster"])
def test_template_fits_into_cloudformation(default: Deployment, stack: str) -> None:
    size = (default.folder / f"holdfast-{stack}.template.json").stat().st_size

    assert size < 1_000_000
    assert len(default.template(stack).resources) < 500
