"""CDK app: cluster settings -> three stacks -> review -> synth. Run by the CDK CLI, see cdk.json."""

from __future__ import annotations

import sys
from pathlib import Path

# before aws_cdk: `constructs/` holds our package and must be a source root (CONTRIBUTING.md)
sys.path.insert(0, str(Path(__file__).resolve().parent / "constructs"))

import aws_cdk as cdk

from stacks.app import add_stacks
from stacks.config import from_context
from stacks.review import review
from training.errors import ConfigError


def main() -> int:
    """Synthesise into the folder that the CLI names; return the exit code."""
    app = cdk.App(
        # its engine takes 7 s to start; cfn-lint checks the same rules in CI (test_templates.py)
        builtin_cloud_formation_validation=False,
        # traces hold the name of a temporary folder, and two runs would differ
        context={"aws:cdk:disable-creation-stack-traces": True},
        stack_traces=False,
    )
    try:
        config = from_context(app.node.try_get_context("cluster"))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    review(app, add_stacks(app, config), config)
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
