"""Tags of everything: whose cluster it is, and what the budget filters by."""

from __future__ import annotations

from stacks.config import ClusterConfig

CLUSTER_TAG = "holdfast:cluster"
"""Activate it as a cost-allocation tag in the billing console, or the budget sees nothing."""


def cluster_tag(config: ClusterConfig) -> tuple[str, str]:
    """Return the cost-allocation tag."""
    return CLUSTER_TAG, config.name


def tags(config: ClusterConfig) -> dict[str, str]:
    """Return all tags."""
    key, value = cluster_tag(config)
    return {key: value, **config.tags}
