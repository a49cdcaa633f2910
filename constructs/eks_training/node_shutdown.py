"""How long pods have to end when their node shuts down, and how long before its end capacity is drained.

Imports nothing: nodes and stacks are built from it, and `k8s/` tells from it when a run has to stop.
"""

POD_SHUTDOWN_SECONDS = 120
"""From SIGTERM to SIGKILL of pods that are not critical to the node."""

CRITICAL_POD_SHUTDOWN_SECONDS = 30
"""The same for critical ones, network and storage plugins, which end after all others."""

BLOCK_DRAIN_SECONDS = 3600
"""Time before the end of a capacity block at which its group is emptied. EC2 starts to end the instances
half an hour before it."""
