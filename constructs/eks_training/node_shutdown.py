"""How long pods have to end: the kubelet's limit when a node shuts down, and the pods' own.

Imports nothing: `node_user_data.py` sets the kubelet's limit from it, `k8s/` the grace period of a
trainer pod. A pod that asked for more would be killed early on a node that shuts down, and only there.
"""

POD_SHUTDOWN_SECONDS = 120
"""From SIGTERM to SIGKILL of pods that are not critical to the node."""

CRITICAL_POD_SHUTDOWN_SECONDS = 30
"""The same for critical ones, network and storage plugins, which end after all others."""
