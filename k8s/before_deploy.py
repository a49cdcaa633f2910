"""Checks of an AWS account before `cdk deploy`, so that a deploy does not fail half way."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass
from functools import partial
from ipaddress import IPv4Network
from typing import TYPE_CHECKING, Any

from k8s.findings import Check, Finding, at_least, fail, ok, warn
from k8s.quotas import InUse, Need, needs
from stacks import rules
from stacks.config import ClusterConfig

if TYPE_CHECKING:
    import boto3

# reserved by AWS in each subnet
_ADDRESSES_FOR_EKS_UPDATES = 5
# RFC 5737; cdk.json comes with one of them
_DOCUMENTATION = tuple(map(IPv4Network, ("192.0.2.0/24", "198.51.100.0/24", "203.0.113.0/24")))


@dataclass(frozen=True, kw_only=True, slots=True)
class Account:
    """An AWS account in the cluster's region."""

    config: ClusterConfig
    session: boto3.Session

    def client(self, service: str) -> Any:
        return self.session.client(service, region_name=self.config.region)

    def checks(self) -> list[Check]:
        """Return all checks, the quick and fatal ones first."""
        checks: list[Callable[[Account], Iterator[Finding]]] = [
            check_identity,
            check_access,
            check_zones,
            check_offering,
            check_capacity,
            check_quotas,
            check_kubernetes_version,
            check_existing_subnet,
        ]
        return [partial(check, self) for check in checks]


def check_identity(account: Account) -> Iterator[Finding]:
    identity = account.client("sts").get_caller_identity()
    wanted = account.config.account
    if wanted and identity["Account"] != wanted:
        message = f"credentials are of {identity['Account']}, the cluster is for {wanted}"
        yield fail("account", message, "choose another AWS_PROFILE")
    else:
        yield ok("account", f"{identity['Account']} as {identity['Arn']}")


def check_access(account: Account) -> Iterator[Finding]:
    """Check who gets in: nobody else does, not even the deployer, so an example's values lock all out."""
    name, access = "access", account.config.access
    for cidr in access.public_cidrs:
        if any(IPv4Network(cidr).subnet_of(network) for network in _DOCUMENTATION):
            fix = 'set access.public_cidrs to your network, or access.endpoint to "private"'
            yield fail(name, f"{cidr} is an address of documentation, which nobody has", fix)
    own_account = account.client("sts").get_caller_identity()["Account"]
    for principal in access.admins:
        if principal.startswith("arn:") and f"::{own_account}:" not in principal:
            yield warn(name, f"{principal} is of another account", "make sure that it exists")
        elif _exists(account.client("iam"), principal):
            yield ok(name, f"{principal} is an admin")
        else:
            yield fail(name, f"{principal} does not exist", "set access.admins to the role that you use")


def _exists(iam: Any, principal: str) -> bool:
    kind, _, path = principal.rpartition(":")[2].partition("/")
    name = path.rpartition("/")[2]
    try:
        if kind == "role":
            iam.get_role(RoleName=name)
        else:
            iam.get_user(UserName=name)
    except iam.exceptions.NoSuchEntityException:
        return False
    return True


def check_zones(account: Account) -> Iterator[Finding]:
    """Show the id behind each zone name: names differ between accounts, ids don't."""
    network = account.config.network
    zones = {zone.name: zone.id for zone in (network.training_zone, *network.control_plane_zones)}
    answer = account.client("ec2").describe_availability_zones(AllAvailabilityZones=True)
    ids = {zone["ZoneName"]: zone["ZoneId"] for zone in answer["AvailabilityZones"]}
    for name, wanted in zones.items():
        found = ids.get(name)
        if found is None:
            fix = f"use one of {', '.join(sorted(ids))}"
            yield fail("zone", f"{name} does not exist for this account", fix)
        elif wanted and wanted != found:
            yield fail("zone", f"{name} is {found}, not {wanted}", "name the zone that has this id")
        else:
            yield ok("zone", f"{name} is {found}")
    for zone in network.cluster_zones:
        if ids.get(zone.name) in rules.NO_CONTROL_PLANE:
            fix = f'set its id to "{ids[zone.name]}" and add a control-plane zone'
            yield fail("zone", f"{zone.name} is {ids[zone.name]}, which hosts no EKS control plane", fix)


def check_offering(account: Account) -> Iterator[Finding]:
    """Offered is not available: capacity shows only when instances are launched."""
    kind, zone = account.config.gpu.instance_type, account.config.network.training_zone.name
    offerings = account.client("ec2").describe_instance_type_offerings(
        LocationType="availability-zone", Filters=[{"Name": "instance-type", "Values": [kind]}]
    )
    zones = sorted(offering["Location"] for offering in offerings["InstanceTypeOfferings"])
    if zone in zones:
        yield ok("offering", f"{kind} is offered in {zone}")
    else:
        fix = f"use {' or '.join(zones)}" if zones else "use another region"
        yield fail("offering", f"{kind} is not offered in {zone}", fix)


def check_capacity(account: Account) -> Iterator[Finding]:
    """Check a reservation or a capacity block: its zone, state, type, size and end."""
    gpu = account.config.gpu
    if not gpu.capacity.reservation_id:
        return
    describe = account.client("ec2").describe_capacity_reservations
    ids = [gpu.capacity.reservation_id]
    found = _found(lambda: describe(CapacityReservationIds=ids)["CapacityReservations"])
    if not found:
        fix = "check gpu.capacity.reservation_id and the region"
        yield fail("capacity", f"{gpu.capacity.reservation_id} does not exist", fix)
        return
    yield from _reservation_findings(account.config, found[0])


def _found(describe: Callable[[], list[dict[str, Any]]]) -> list[dict[str, Any]]:
    """Return what EC2 describes, or nothing where it refuses the id as unknown."""
    from botocore.exceptions import ClientError

    try:
        return describe()
    except ClientError as error:
        if not error.response["Error"]["Code"].endswith((".NotFound", ".Malformed")):
            raise
        return []


def _reservation_findings(config: ClusterConfig, found: dict[str, Any]) -> Iterator[Finding]:
    gpu, zone = config.gpu, config.network.training_zone.name
    state, name = found["State"], "capacity"
    ready = ("active",) if gpu.capacity.mode == "reservation" else ("active", "scheduled")
    if state in ready:
        yield ok(name, f"{gpu.capacity.reservation_id} is {state}")
    else:
        yield fail(name, f"{gpu.capacity.reservation_id} is {state}", "wait for it, or use another")
    if found["AvailabilityZone"] != zone:
        fix = f"set network.training_zone.name to {found['AvailabilityZone']}"
        yield fail(name, f"it is in {found['AvailabilityZone']}, the training zone is {zone}", fix)
    if found["InstanceType"] != gpu.instance_type:
        fix = f"set gpu.instance_type to {found['InstanceType']}"
        yield fail(name, f"it is for {found['InstanceType']}, not {gpu.instance_type}", fix)
    free = found["AvailableInstanceCount"] if state == "active" else found["TotalInstanceCount"]
    fix = "use fewer nodes, or enlarge the reservation"
    yield at_least(name, "instances in it", have=free, need=gpu.group_size, fix=fix)
    end = found.get("EndDate")
    if gpu.capacity.end and end is not None:
        shown = end.strftime("%Y-%m-%dT%H:%M:%SZ")
        if shown != gpu.capacity.end:
            yield fail(name, f"it ends {shown}, not {gpu.capacity.end}", f"set gpu.capacity.end to {shown}")


def check_quotas(account: Account) -> Iterator[Finding]:
    """Compare each quota with what this cluster needs."""
    ec2, client = account.client("ec2"), account.client("service-quotas")
    kinds = ec2.describe_instance_types(InstanceTypes=[account.config.system.instance_type])
    vcpus = kinds["InstanceTypes"][0]["VCpuInfo"]["DefaultVCpus"]
    in_use = InUse(
        vpcs=len(ec2.describe_vpcs()["Vpcs"]), addresses=len(ec2.describe_addresses()["Addresses"])
    )
    for need in needs(account.config, system_vcpus=vcpus, in_use=in_use):
        yield _quota_finding(client, need)


def _quota_finding(client: Any, need: Need) -> Finding:
    from botocore.exceptions import ClientError

    name = f"quota {need.code}"
    try:
        quota = client.get_service_quota(ServiceCode=need.service, QuotaCode=need.code)["Quota"]["Value"]
    except ClientError as error:
        if error.response["Error"]["Code"] != "NoSuchResourceException":
            raise
        return warn(name, f"{need.name}: no value for this account", "look at the Service Quotas console")
    fix = (
        f"aws service-quotas request-service-quota-increase --service-code {need.service} "
        f"--quota-code {need.code} --desired-value {max(need.amount, quota):g}; it can take days"
    )
    return at_least(name, need.name, have=quota, need=need.amount, fix=fix)


def check_kubernetes_version(account: Account) -> Iterator[Finding]:
    """Check with EKS that it still creates clusters of this version, and under which support."""
    version = account.config.kubernetes_version
    found = account.client("eks").describe_cluster_versions()["clusterVersions"]
    statuses = {entry["clusterVersion"]: entry["versionStatus"] for entry in found}
    status = statuses.get(version, "UNSUPPORTED")
    if status == "UNSUPPORTED":
        usable = sorted(v for v, s in statuses.items() if s != "UNSUPPORTED")
        yield fail("kubernetes", f"EKS no longer creates {version}", f"use one of {', '.join(usable)}")
    elif status == "EXTENDED_SUPPORT" and account.config.support == "standard":
        fix = 'use a newer version, or set support = "extended" (six times the fee)'
        yield fail("kubernetes", f"{version} has left standard support", fix)
    else:
        yield ok("kubernetes", f"{version}: {status.lower().replace('_', ' ')}")


def check_existing_subnet(account: Account) -> Iterator[Finding]:
    """Check the room in a subnet that is not ours; a new one is checked by `cdk synth`."""
    existing, gpu = account.config.network.existing, account.config.gpu
    if existing is None:
        return
    describe = account.client("ec2").describe_subnets
    found = _found(lambda: describe(SubnetIds=[existing.training_subnet_id])["Subnets"])
    if not found:
        fix = "check network.existing.training_subnet_id and the region"
        yield fail("subnet", f"{existing.training_subnet_id} does not exist", fix)
        return
    subnet, zone = found[0], account.config.network.training_zone.name
    if subnet["AvailabilityZone"] != zone:
        fix = "name a subnet of the training zone"
        yield fail("subnet", f"{subnet['SubnetId']} is in {subnet['AvailabilityZone']}, not {zone}", fix)
    need = gpu.group_size * gpu.instance.addresses_per_node + _ADDRESSES_FOR_EKS_UPDATES
    free = subnet["AvailableIpAddressCount"]
    yield at_least("subnet", "free addresses", have=free, need=need, fix="use a larger subnet")
