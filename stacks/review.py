"""Rules that `cdk synth` checks."""

from __future__ import annotations

import aws_cdk as cdk
from cdk_nag import AwsSolutionsChecks


def review(app: cdk.App) -> None:
    """Check every stack with cdk-nag's AwsSolutions."""
    cdk.Validations.of(app).add_plugins(AwsSolutionsChecks(app, write_suppressions_to_cloud_formation=True))
