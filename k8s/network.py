"""Ports, addresses and the NCCL/EFA environment of a run's pods."""

from __future__ import annotations

from k8s.pod import Manifest, value_of
from k8s.run import Run

CONTROL_PORT = 29500
SMOKE_PORT = 29600
LISTENING_PORTS = (CONTROL_PORT, SMOKE_PORT)
"""Fixed ports; all below the range that outgoing connections take theirs from."""

# The kernel's default, 32768-60999, is narrow for the all-to-all connections of many ranks.
EPHEMERAL_PORTS = (30000, 65535)


def control_name(name: str) -> str:
    return f"{name}-control"


def control_address(run: Run, *, name: str) -> str:
    """Return the host name of the control store of the Job `name`."""
    return f"{control_name(name)}.{run.outputs.namespace}.svc"


def pod_sysctls() -> list[Manifest]:
    low, high = EPHEMERAL_PORTS
    return [{"name": "net.ipv4.ip_local_port_range", "value": f"{low} {high}"}]


def network_environment(run: Run) -> list[Manifest]:
    """Return what NCCL, its OFI plugin and libfabric need on EFA instances."""
    variables = {
        "NCCL_DEBUG": "WARN",
        # more than 4 GPUs fail to initialise over these, and TCP fallback hangs on Pod Identity's
        "NCCL_SOCKET_IFNAME": "^lo,docker,veth,eni,pod-id-link0",
    }
    if run.resources.efa_interfaces:
        variables["FI_PROVIDER"] = "efa"  # makes a missing EFA loud instead of slow
        if not run.resources.hugepages_mib:
            variables["FI_EFA_USE_HUGE_PAGE"] = "0"  # fork in data workers ends in ENOMEM otherwise
        if run.instance.gpudirect_rdma is False:
            variables["FI_EFA_USE_DEVICE_RDMA"] = "0"
    if run.recipe.recovery.in_process:
        variables["NCCL_NVLS_ENABLE"] = "0"  # NVLS can't be aborted
        variables["TORCH_NCCL_RETHROW_CUDA_ERRORS"] = "0"
    return [value_of(name, value) for name, value in variables.items()]
