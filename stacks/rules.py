"""Rules of AWS that no service checks before the deploy is half done. Each yields `Problem`s."""

from __future__ import annotations

from collections.abc import Collection, Iterator, Mapping, Sequence
from ipaddress import AddressValueError, IPv4Network, NetmaskValueError

from training import schema
from training.errors import Problem

# the newest minor that aws-cdk-lib names and a kubectl layer exists for (requirements-infra.txt pins both)
NEWEST_KUBERNETES = "1.36"
_KUBECTL_MINOR = 36
_STANDARD_SUPPORT = ("1.35", "1.36")
# EKS creates these only with extended support; 1.34 leaves standard support on 2026-12-02
_EXTENDED_SUPPORT = ("1.32", "1.33", "1.34")

# EKS rejects control-plane subnets here (UnsupportedAvailabilityZoneException); nodes may be there
NO_CONTROL_PLANE = frozenset({"use1-az3", "usw1-az2", "cac1-az3"})

ADDONS = (
    "vpc-cni",
    "kube-proxy",
    "eks-pod-identity-agent",
    "coredns",
    "aws-fsx-csi-driver",
    "eks-node-monitoring-agent",
)

# a private subnet is a quarter of the VPC, so three zones and the public subnets fit
PRIVATE_SUBNET_BITS = 2
# one interface of an m7i.xlarge (15) that vpc-cni fills, twice
ADDRESSES_PER_SYSTEM_NODE = 30
# AWS keeps 5 of each subnet, EKS needs 5 for an update of the control plane, FSx takes 2 or more
RESERVED_ADDRESSES = 16


def zones(training: str, others: Sequence[str]) -> Iterator[Problem]:
    """Check the number of control-plane zones and that none is named twice."""
    path = "control_plane_zones"
    if not 1 <= len(others) <= 2:
        rule = "needs one zone, or two where the training zone cannot host the control plane"
        yield Problem(path=path, value=list(others), rule=rule, fix="change it")
    if len({training, *others}) < len(others) + 1:
        rule = f"must differ from each other and from training_zone={training}"
        yield Problem(path=path, value=list(others), rule=rule, fix="name another zone")


def control_plane_hosts(zone_ids: Sequence[str]) -> Iterator[Problem]:
    """Check that EKS can put its control plane into each zone."""
    for index, zone_id in enumerate(zone_ids):
        if zone_id in NO_CONTROL_PLANE:
            path = f"control_plane_zones[{index}].id"
            rule = "cannot host an EKS control plane"
            yield Problem(path=path, value=zone_id, rule=rule, fix="name another zone")


def is_network(cidr: str) -> bool:
    """Say whether `cidr` is an IPv4 network without host bits."""
    try:
        IPv4Network(cidr)
    except (AddressValueError, NetmaskValueError, ValueError):
        return False
    return True


def cidrs(vpc: str, service: str) -> Iterator[Problem]:
    """Check the networks of the VPC and of the Services."""
    wrong = [name for name, cidr in (("cidr", vpc), ("service_cidr", service)) if not is_network(cidr)]
    for name in wrong:
        value = vpc if name == "cidr" else service
        yield Problem(path=name, value=value, rule="must be an IPv4 network", fix="use 10.0.0.0/16, say")
    if wrong:
        return
    if not 16 <= IPv4Network(vpc).prefixlen <= 22:
        fix = "use 10.0.0.0/16"
        yield Problem(path="cidr", value=vpc, rule="must be from /16 to /22", fix=fix)
    if not _is_service_network(IPv4Network(service)):
        rule = "must be a private network from /12 to /24"
        yield Problem(path="service_cidr", value=service, rule=rule, fix="use 172.20.0.0/16")
    if IPv4Network(vpc).overlaps(IPv4Network(service)):
        rule = f"overlaps cidr={vpc}"
        yield Problem(path="service_cidr", value=service, rule=rule, fix="use 172.20.0.0/16")


def _is_service_network(network: IPv4Network) -> bool:
    private = ("10.0.0.0/8", "172.16.0.0/12", "192.168.0.0/16")
    inside = any(network.subnet_of(IPv4Network(block)) for block in private)
    return inside and 12 <= network.prefixlen <= 24


def public_cidr(path: str, cidr: str) -> Iterator[Problem]:
    """Check one network that may reach the public endpoint."""
    if not is_network(cidr):
        fix = "use 203.0.113.7/32, say"
        yield Problem(path=path, value=cidr, rule="must be an IPv4 network", fix=fix)
    elif IPv4Network(cidr).prefixlen == 0:
        rule = "opens the Kubernetes API to the whole internet"
        yield Problem(path=path, value=cidr, rule=rule, fix="list your addresses")


def reservation(*, mode: str, reservation_id: str) -> Iterator[Problem]:
    """Check that a reservation is named exactly where the mode needs one."""
    if mode == "on-demand" and reservation_id:
        fix = 'set mode to "reservation" or "capacity-block", or leave it out'
        rule = "has no meaning with mode=on-demand"
        yield Problem(path="reservation_id", value=reservation_id, rule=rule, fix=fix)
    if mode != "on-demand" and not reservation_id:
        fix = "set the id, cr-..."
        yield Problem(path="reservation_id", rule=f"is required with mode={mode}", fix=fix)


def lustre_capacity(gib: int) -> Iterator[Problem]:
    """Check the size of a SCRATCH_2 file system (CDK accepts 0, cfn-lint 3600)."""
    if gib == 1200 or (gib > 0 and gib % 2400 == 0):
        return
    lower = max(gib // 2400 * 2400, 1200)
    higher = 2400 if lower == 1200 else lower + 2400
    rule = "SCRATCH_2 takes 1200 or a multiple of 2400"
    yield Problem(path="capacity_gib", value=gib, rule=rule, fix=f"use {lower} or {higher}")


def kubernetes_version(version: str, *, support: str, applies: bool) -> Iterator[Problem]:
    """Check that EKS creates this version and that the kubectl layer can talk to it."""
    known = (*_EXTENDED_SUPPORT, *_STANDARD_SUPPORT)
    path = "kubernetes_version"
    if version not in known:
        rule = f"cannot be created: EKS offers, and aws-cdk-lib knows, {', '.join(known)}"
        yield Problem(path=path, value=version, rule=rule, fix=f"use {NEWEST_KUBERNETES}")
        return
    if version in _EXTENDED_SUPPORT and support == "standard":
        rule = "is past its standard support"
        fix = f'use {NEWEST_KUBERNETES}, or set support="extended" (six times the fee)'
        yield Problem(path=path, value=version, rule=rule, fix=fix)
    if applies and abs(int(version.split(".")[1]) - _KUBECTL_MINOR) > 1:
        rule = f"is more than one minor version from the kubectl layer's 1.{_KUBECTL_MINOR}"
        fix = f'use {NEWEST_KUBERNETES}, or set in_cluster_software="render"'
        yield Problem(path=path, value=version, rule=rule, fix=fix)


def text_values(path: str, table: Mapping[str, object], *, known: Collection[str] = ()) -> Iterator[Problem]:
    """Check that a free table maps names to text, and its names where they are `known`."""
    for key, value in table.items():
        if known and key not in known:
            fix = schema.suggest(key, list(known))
            yield Problem(path=f"{path}.{key}", rule="unknown key", fix=fix)
        if not isinstance(value, str):
            yield Problem(path=f"{path}.{key}", value=value, rule="must be text", fix="quote it")
