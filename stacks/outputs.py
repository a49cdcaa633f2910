"""CloudFormation outputs: what `k8s/outputs.py` reads, each written by the stack that owns the value."""

from __future__ import annotations

from collections.abc import Mapping

import aws_cdk as cdk


def write_outputs(stack: cdk.Stack, values: Mapping[str, str]) -> None:
    """Write one output a value. One that is empty is left out: readers take it as empty."""
    for name, value in values.items():
        if value:
            cdk.CfnOutput(stack, name, value=value)
