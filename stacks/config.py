"""ClusterConfig: the `cluster` context of cdk.json, typed and checked before anything is built.

Imports no aws_cdk, so `k8s doctor` and editors can use it. stacks/cluster.schema.json is generated from
it (`python -m stacks.config > stacks/cluster.schema.json`; a test keeps it current).
"""

from __future__ import annotations

import json
import sys
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from ipaddress import IPv4Network
from typing import Annotated, Any, Literal

from eks_training.instance_types import INSTANCE_TYPES, InstanceType
from eks_training.node_shutdown import BLOCK_DRAIN_SECONDS
from stacks import rules
from stacks.fields import (
    Account,
    BucketName,
    Email,
    ImageId,
    Name,
    Principal,
    Region,
    ReservationId,
    SubnetId,
    Timestamp,
    VpcId,
    ZoneId,
    ZoneName,
)
from training import schema
from training.errors import ConfigError, Problem
from training.schema import Pattern, Range

CapacityMode = Literal["on-demand", "reservation", "capacity-block"]

BLOCK_DRAIN = timedelta(seconds=BLOCK_DRAIN_SECONDS)
MAXIMUM_BLOCK_INSTANCES = 64


@dataclass(frozen=True, kw_only=True, slots=True)
class Zone:
    """An availability zone."""

    name: ZoneName
    """Name in this account, such as us-west-2b."""
    id: ZoneId = ""
    """Id behind the name (`python -m k8s doctor` prints it). Given, synth checks it against the zones that
    cannot host an EKS control plane."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ExistingNetwork:
    """A VPC that is already there, used by its ids: nothing in it is changed."""

    vpc_id: VpcId
    training_subnet_id: SubnetId
    """Private subnet of the training zone, with a route to the internet and one to S3."""
    control_plane_subnet_ids: tuple[SubnetId, ...]
    """Private subnets for the control plane, in the order of the zones that host it."""


@dataclass(frozen=True, kw_only=True, slots=True)
class NetworkConfig:
    """Where the cluster stands."""

    training_zone: Zone
    """Zone of the GPU nodes and the file system. A reservation dictates it."""
    control_plane_zones: tuple[Zone, ...]
    """Further zones for the control plane: one, or two where the training zone cannot host it."""
    cidr: str = "10.0.0.0/16"
    """Addresses of the VPC; a quarter of them is the training subnet."""
    service_cidr: str = "172.20.0.0/16"
    """Addresses of Kubernetes Services; nodes repeat it, so it cannot be left to EKS."""
    interface_endpoints: bool = False
    """Reach AWS inside the VPC: eight endpoints, about $0.01 an hour each and zone."""
    existing: ExistingNetwork | None = None
    """Use this VPC in place of a new one; `cidr` must be its addresses."""

    @property
    def cluster_zones(self) -> tuple[Zone, ...]:
        """Zones of the control plane, the training zone first where EKS allows it."""
        hosted = () if self.training_zone.id in rules.NO_CONTROL_PLANE else (self.training_zone,)
        return (*hosted, *self.control_plane_zones)

    @property
    def training_subnet(self) -> IPv4Network:
        """Addresses of the training subnet in a new VPC."""
        return next(IPv4Network(self.cidr).subnets(prefixlen_diff=rules.PRIVATE_SUBNET_BITS))

    def problems(self) -> Iterator[Problem]:
        yield from rules.zones(self.training_zone.name, [zone.name for zone in self.control_plane_zones])
        yield from rules.control_plane_hosts([zone.id for zone in self.control_plane_zones])
        if len(self.cluster_zones) < 2:
            rule = f"needs two zones that can host it, and {self.training_zone.id} cannot"
            yield Problem(path="control_plane_zones", rule=rule, fix="add a zone")
        yield from rules.cidrs(self.cidr, self.service_cidr)
        if self.existing and len(self.existing.control_plane_subnet_ids) != len(self.cluster_zones):
            rule = f"needs one subnet for each of {', '.join(zone.name for zone in self.cluster_zones)}"
            ids = self.existing.control_plane_subnet_ids
            yield Problem(path="existing.control_plane_subnet_ids", value=ids, rule=rule, fix="change it")


@dataclass(frozen=True, kw_only=True, slots=True)
class AccessConfig:
    """Who reaches the Kubernetes API."""

    admins: tuple[Principal, ...]
    """IAM roles and users with the cluster-admin policy. Nobody else gets in, not even the deployer."""
    endpoint: Literal["public-and-private", "private"] = "public-and-private"
    """private: only from inside the VPC (VPN, bastion, SSM)."""
    public_cidrs: tuple[str, ...] = ()
    """Addresses that may reach the public endpoint."""

    def problems(self) -> Iterator[Problem]:
        if not self.admins:
            rule = "needs at least one principal, or nobody can use kubectl"
            yield Problem(path="admins", rule=rule, fix='set ["role/YOUR-ROLE"]')
        if self.endpoint == "private" and self.public_cidrs:
            rule = "has no meaning with endpoint=private"
            yield Problem(path="public_cidrs", value=self.public_cidrs, rule=rule, fix="leave it out")
        if self.endpoint == "public-and-private" and not self.public_cidrs:
            fix = 'list your addresses, or set endpoint="private"'
            yield Problem(path="public_cidrs", rule="must name who may reach the public endpoint", fix=fix)
        for index, cidr in enumerate(self.public_cidrs):
            yield from rules.public_cidr(f"public_cidrs[{index}]", cidr)


@dataclass(frozen=True, kw_only=True, slots=True)
class CapacityConfig:
    """How EC2 provides the GPU instances."""

    mode: CapacityMode = "on-demand"
    """on-demand, reservation (an On-Demand Capacity Reservation), or capacity-block."""
    reservation_id: ReservationId = ""
    """Id of the reservation or of the block."""
    placement_group: str = ""
    """Placement group of a reservation that was made in one; any other makes EC2 ignore the reservation."""
    start: Timestamp = ""
    """When a block starts: nodes are launched then. Leave it out once the block has begun."""
    end: Timestamp = ""
    """When a block ends. Nodes are scaled to zero an hour before."""

    @property
    def drain_at(self) -> datetime | None:
        """When the group is scaled to zero, UTC; None where capacity does not end."""
        return _moment(self.end) - BLOCK_DRAIN if self.end else None

    def problems(self) -> Iterator[Problem]:
        yield from rules.reservation(mode=self.mode, reservation_id=self.reservation_id)
        if self.placement_group and self.mode != "reservation":
            rule = f"has no meaning with mode={self.mode}"
            value = self.placement_group
            yield Problem(path="placement_group", value=value, rule=rule, fix="leave it out")
        yield from self._block_problems()

    def _block_problems(self) -> Iterator[Problem]:
        if self.mode != "capacity-block":
            for name in ("start", "end"):
                if getattr(self, name):
                    rule = f"has no meaning with mode={self.mode}"
                    fix = 'leave it out, or set mode="capacity-block"'
                    yield Problem(path=name, value=getattr(self, name), rule=rule, fix=fix)
            return
        if not self.end:
            fix = "set what `aws ec2 describe-capacity-reservations` shows as EndDate"
            yield Problem(path="end", rule="is required with mode=capacity-block", fix=fix)
            return
        drain_at = _valid_moment(self.end)
        if drain_at is None or (self.start and _valid_moment(self.start) is None):
            yield Problem(path="end", value=self.end, rule="start and end must be dates", fix="change it")
        elif self.start and _moment(self.start) >= _moment(self.end) - BLOCK_DRAIN:
            rule = f"must be more than an hour before end={self.end}"
            yield Problem(path="start", value=self.start, rule=rule, fix="change it")


@dataclass(frozen=True, kw_only=True, slots=True)
class GpuConfig:
    """The training nodes."""

    instance_type: str = "p5.48xlarge"
    """GPU instance type with EFA; see constructs/eks_training/instance_types.py."""
    nodes: Annotated[int, Range(minimum=1, maximum=1000)] = 2
    """Nodes that train."""
    spares: Annotated[int, Range(minimum=0)] = 0
    """Hot-spare nodes beside them, fewer than `nodes`. A dead node is replaced by hand."""
    parked: bool = False
    """Scale the group to zero and keep everything else: what a weekend costs."""
    capacity: CapacityConfig = field(default_factory=CapacityConfig)
    ami_id: ImageId = ""
    """EKS AL2023 NVIDIA image; empty for the newest at each deploy (running nodes are never rolled)."""
    root_volume_gib: Annotated[int, Range(minimum=200, maximum=16384)] = 500
    """Encrypted gp3 root volume; images and pods live on the NVMe disks."""

    @property
    def instance(self) -> InstanceType:
        """The row of the instance table."""
        return INSTANCE_TYPES[self.instance_type]

    @property
    def group_size(self) -> int:
        """Instances of the Auto Scaling group."""
        return self.nodes + self.spares

    def problems(self) -> Iterator[Problem]:
        if self.instance_type not in INSTANCE_TYPES:
            rule = "is not a known GPU instance type with EFA"
            fix = schema.suggest(self.instance_type, list(INSTANCE_TYPES))
            yield Problem(path="instance_type", value=self.instance_type, rule=rule, fix=fix)
        elif self.capacity.mode == "capacity-block" and not self.instance.capacity_blocks:
            rule = f"is not sold for {self.instance_type}"
            yield Problem(path="capacity.mode", value="capacity-block", rule=rule, fix="use on-demand")
        if self.spares >= self.nodes:
            rule = f"must be below nodes={self.nodes}"
            yield Problem(path="spares", value=self.spares, rule=rule, fix="use fewer spares")
        if self.capacity.mode == "capacity-block" and self.group_size > MAXIMUM_BLOCK_INSTANCES:
            rule = f"with spares={self.spares}, a block has at most {MAXIMUM_BLOCK_INSTANCES} instances"
            yield Problem(path="nodes", value=self.nodes, rule=rule, fix="use fewer nodes")


@dataclass(frozen=True, kw_only=True, slots=True)
class SystemConfig:
    """The small managed group for controllers and the control store."""

    instance_type: Annotated[
        str, Pattern(regex=r"[a-z][a-z0-9-]*\.[a-z0-9-]+", description="an x86-64 type such as m7i.xlarge")
    ] = "m7i.xlarge"
    nodes: Annotated[int, Range(minimum=2, maximum=10)] = 2
    """Two, so that one can be replaced without an outage of the control store's node pool."""


@dataclass(frozen=True, kw_only=True, slots=True)
class DataRepositoryConfig:
    """An S3 bucket that appears as a folder of the file system, both ways."""

    bucket: BucketName = ""
    """An existing bucket of the same region; empty to make one, which outlives the stacks."""
    prefix: Annotated[
        str, Pattern(regex=r"|[\w.-][\w./-]*", description="a key prefix without a leading /")
    ] = ""
    """Keys that appear; empty for all."""
    path: Annotated[str, Pattern(regex=r"/[\w./-]+", description="an absolute folder such as /datasets")] = (
        "/datasets"
    )
    """Folder of the file system."""


@dataclass(frozen=True, kw_only=True, slots=True)
class StorageConfig:
    """The shared file system: scratch, never the only copy of anything."""

    capacity_gib: int = 1200
    """1200, or a multiple of 2400. Writes run at 100 MB/s a TiB: 96 GB of state take 14 minutes at 1200."""
    data_repository: DataRepositoryConfig | None = None
    """Optional link to S3."""

    def problems(self) -> Iterator[Problem]:
        yield from rules.lustre_capacity(self.capacity_gib)


@dataclass(frozen=True, kw_only=True, slots=True)
class OperationsConfig:
    """Money and alarms."""

    alarm_email: Email = ""
    """Gets budget, capacity and node-health alarms; empty for the topic alone."""
    monthly_budget_usd: Annotated[int, Range(minimum=0)] = 0
    """Alarm at 80% spent and at 100% forecast; 0 for no budget."""
    log_retention_days: Literal[7, 14, 30, 60, 90, 180, 365] = 90
    """How long control-plane, flow and build logs are kept."""


@dataclass(frozen=True, kw_only=True, slots=True)
class ClusterConfig:
    """The `cluster` context of cdk.json."""

    name: Name
    """Name of the cluster, and prefix of everything that has a name."""
    region: Region
    account: Account = ""
    """The account that it may be deployed to; empty for whatever the credentials say."""
    kubernetes_version: str = rules.NEWEST_KUBERNETES
    """Minor version of Kubernetes."""
    support: Literal["standard", "extended"] = "standard"
    """extended keeps an old version past its standard support, for six times the cluster's fee."""
    network: NetworkConfig
    access: AccessConfig
    gpu: GpuConfig = field(default_factory=GpuConfig)
    system: SystemConfig = field(default_factory=SystemConfig)
    storage: StorageConfig = field(default_factory=StorageConfig)
    operations: OperationsConfig = field(default_factory=OperationsConfig)
    namespace: Name = "training"
    """Kubernetes namespace of the jobs."""
    in_cluster_software: Literal["apply", "render"] = "apply"
    """apply: the deploy installs device plugins, volume and service accounts. render: it does not, and
    `python -m stacks.render outputs.json` writes them for GitOps."""
    build_images: bool = True
    """Start the image build in CodeBuild at each deploy that changes the sources."""
    addon_versions: dict[str, str] = field(default_factory=dict)
    """Pin EKS add-ons, as {"vpc-cni": "v1.22.4-eksbuild.1"}; empty for EKS's default."""
    tags: dict[str, str] = field(default_factory=dict)
    """Further tags for everything."""

    @property
    def zones(self) -> tuple[str, ...]:
        """Names of all zones, the training zone first."""
        return (self.network.training_zone.name, *(zone.name for zone in self.network.control_plane_zones))

    def problems(self) -> Iterator[Problem]:
        yield from rules.kubernetes_version(
            self.kubernetes_version, support=self.support, applies=self.in_cluster_software == "apply"
        )
        for zone in self.zones:
            if not zone.startswith(self.region):
                fix = "use a zone of it, or another region"
                yield Problem(path="network", value=zone, rule=f"is not in region={self.region}", fix=fix)
        yield from rules.text_values("addon_versions", self.addon_versions, known=rules.ADDONS)
        yield from rules.text_values("tags", self.tags)
        if self.gpu.instance_type in INSTANCE_TYPES and self.network.existing is None:
            yield from self._address_problems()

    def _address_problems(self) -> Iterator[Problem]:
        if not rules.is_network(self.network.cidr):
            return
        nodes, per_node = self.gpu.group_size, self.gpu.instance.addresses_per_node
        system = self.system.nodes * rules.ADDRESSES_PER_SYSTEM_NODE
        needed = nodes * per_node + system + rules.RESERVED_ADDRESSES
        subnet = self.network.training_subnet
        if subnet.num_addresses < needed:
            rule = f"gives the training subnet {subnet.num_addresses} addresses; {nodes} nodes need {needed}"
            yield Problem(path="network.cidr", value=self.network.cidr, rule=rule, fix="use a larger network")


def from_context(context: object) -> ClusterConfig:
    """Build the settings from the `cluster` context: a table, or JSON text from `cdk -c cluster=...`."""
    if context is None:
        fix = "run from the repository root, or add it to cdk.json"
        raise ConfigError.of("cluster", None, "is missing from the CDK context", fix)
    return schema.load(ClusterConfig, _table(context), path="cluster")


def json_schema() -> dict[str, Any]:
    """Return the JSON schema of cdk.json's `cluster` context."""
    return {
        "$schema": "https://json-schema.org/draft/2020-12/schema",
        "title": "Holdfast cluster",
        **schema.json_schema(ClusterConfig),
    }


def _table(context: object) -> Mapping[str, Any]:
    if isinstance(context, str):
        try:
            context = json.loads(context)
        except json.JSONDecodeError as error:
            rule = f"must be JSON ({error})"
            raise ConfigError.of("cluster", context, rule, "quote it for the shell") from None
    if not isinstance(context, Mapping):
        raise ConfigError.of("cluster", context, "must be a table", "see cdk.json")
    return context


def _moment(text: str) -> datetime:
    return datetime.fromisoformat(text)


def _valid_moment(text: str) -> datetime | None:
    try:
        return _moment(text)
    except ValueError:
        return None


if __name__ == "__main__":
    json.dump(json_schema(), sys.stdout, indent=2)
    sys.stdout.write("\n")
