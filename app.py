"""CDK app: cluster settings -> three stacks -> review -> synth. Run by the CDK CLI, see cdk.json."""

from __future__ import annotations

import sys
from pathlib import Path

# before aws_cdk: `constructs/` holds our package and must be a source root (CONTRIBUTING.md)
sys.path.insert(0, str(Path(__file__).resolve().parent / "constructs"))

import aws_cdk as cdk  # noqa: E402

from stacks.app import add_stacks  # noqa: E402
from stacks.config import from_context  # noqa: E402
from stacks.review import review  # noqa: E402
from training.errors import ConfigError  # noqa: E402


def main() -> int:
    """Synthesise into the folder that the CLI names; return the exit code."""
    app = cdk.App()
    try:
        config = from_context(app.node.try_get_context("cluster"))
    except ConfigError as error:
        sys.stderr.write(f"{error}\n")
        return error.exit_code
    add_stacks(app, config)
    review(app)
    app.synth()
    return 0


if __name__ == "__main__":
    sys.exit(main())
