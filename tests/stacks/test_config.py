from __future__ import annotations

import json
import subprocess
import sys
from datetime import UTC, datetime
from typing import Any

import pytest

from stacks.config import from_context, json_schema
from tests.stacks.conftest import CONTEXT, ROOT, Changes, merged
from training.errors import ConfigError

BLOCK = {"mode": "capacity-block", "reservation_id": "cr-0123456789abcdef0", "end": "2026-12-14T11:30:00Z"}


def problems(changes: Changes) -> str:
    with pytest.raises(ConfigError) as error:
        from_context(merged(CONTEXT["cluster"], changes))
    return str(error.value)


def load(changes: Changes) -> Any:
    return from_context(merged(CONTEXT["cluster"], changes))


def gpu(**changes: Any) -> Changes:
    return {"gpu": changes}


def capacity(**changes: Any) -> Changes:
    return {"gpu": {"capacity": changes}}


def network(**changes: Any) -> Changes:
    return {"network": changes}


@pytest.mark.parametrize(
    ("changes", "message"),
    [
        (
            gpu(instance_typ="p5.48xlarge"),
            "cluster.gpu.instance_typ: unknown key; did you mean 'instance_type'?",
        ),
        (gpu(instance_type="p5.48xlage"), "did you mean 'p5.48xlarge'?"),
        (gpu(instance_type="p3.2xlarge"), "cluster.gpu.instance_type='p3.2xlarge': is not a known GPU"),
        (gpu(nodes=0), "cluster.gpu.nodes=0: must be from 1 to 1000"),
        (gpu(nodes="2"), "cluster.gpu.nodes='2': must be a whole number, not str"),
        (gpu(nodes=2, spares=2), "cluster.gpu.spares=2: must be below nodes=2"),
        (gpu(ami_id="ami-xyz"), "cluster.gpu.ami_id='ami-xyz': must be an AMI id, or empty"),
        (gpu(root_volume_gib=50), "cluster.gpu.root_volume_gib=50: must be from 200 to 16384"),
        ({"kubernetes_version": "1.28"}, "kubernetes_version='1.28': cannot be created: EKS offers"),
        ({"kubernetes_version": "1.33"}, "kubernetes_version='1.33': is past its standard support"),
        (
            {"kubernetes_version": "1.33", "support": "extended"},
            "is more than one minor version from the kubectl layer's 1.36",
        ),
        ({"name": "Holdfast"}, "cluster.name='Holdfast': must be 2 to 30"),
        ({"account": "1234"}, "cluster.account='1234': must be 12 digits, or empty"),
        ({"region": "us-east-1"}, "cluster.network='us-west-2b': is not in region=us-east-1"),
        ({"tags": {"team": 7}}, "cluster.tags.team=7: must be text"),
        (
            {"addon_versions": {"vpc-cnl": "v1"}},
            "addon_versions.vpc-cnl: unknown key; did you mean 'vpc-cni'?",
        ),
        (
            {"storage": {"capacity_gib": 0}},
            "capacity_gib=0: SCRATCH_2 takes 1200 or a multiple of 2400; use 1200",
        ),
        ({"storage": {"capacity_gib": 1000}}, "capacity_gib=1000: SCRATCH_2 takes"),
        ({"storage": {"capacity_gib": 3600}}, "use 2400 or 4800"),
        ({"storage": {"capacity_gib": -2400}}, "capacity_gib=-2400: SCRATCH_2 takes"),
        ({"access": {"admins": []}}, "cluster.access.admins: needs at least one principal"),
        ({"access": {"admins": ["bob"]}}, "cluster.access.admins[0]='bob': must be an IAM ARN"),
        (
            {"access": {"public_cidrs": []}},
            "access.public_cidrs: must name who may reach the public endpoint",
        ),
        ({"access": {"public_cidrs": ["0.0.0.0/0"]}}, "opens the Kubernetes API to the whole internet"),
        (
            {"access": {"public_cidrs": ["203.0.113.7/24"]}},
            "public_cidrs[0]='203.0.113.7/24': must be an IPv4",
        ),
        ({"access": {"endpoint": "private"}}, "public_cidrs=('203.0.113.0/24',): has no meaning with"),
        (capacity(mode="reservation"), "capacity.reservation_id: is required with mode=reservation"),
        (capacity(reservation_id="cr-0123456789abcdef0"), "has no meaning with mode=on-demand"),
        (capacity(end="2026-12-14T11:30:00Z"), "capacity.end='2026-12-14T11:30:00Z': has no meaning"),
        (capacity(placement_group="mine"), "capacity.placement_group='mine': has no meaning"),
        (capacity(**{**BLOCK, "end": ""}), "capacity.end: is required with mode=capacity-block"),
        (capacity(**{**BLOCK, "end": "2026-13-14T11:30:00Z"}), "start and end must be dates"),
        (
            capacity(**{**BLOCK, "start": "2026-12-14T11:00:00Z"}),
            "start='2026-12-14T11:00:00Z': must be more",
        ),
        (gpu(instance_type="g6e.8xlarge", capacity=BLOCK), "is not sold for g6e.8xlarge"),
        (gpu(nodes=64, spares=1, capacity=BLOCK), "a block has at most 64 instances"),
        (network(training_zone={"name": "usw2-az2"}), "must be the name of an availability zone"),
        (network(control_plane_zones=[]), "network.control_plane_zones=[]: needs one zone"),
        (network(control_plane_zones=[{"name": "us-west-2b"}]), "must differ from each other"),
        (
            network(control_plane_zones=[{"name": "us-west-2c", "id": "usw1-az2"}]),
            "control_plane_zones[0].id='usw1-az2': cannot host an EKS control plane",
        ),
        (
            network(training_zone={"name": "us-west-2b", "id": "use1-az3"}),
            "needs two zones that can host it, and use1-az3 cannot",
        ),
        (network(cidr="10.0.0.0/8"), "network.cidr='10.0.0.0/8': must be from /16 to /22"),
        (network(cidr="10.0.0.1/16"), "network.cidr='10.0.0.1/16': must be an IPv4 network"),
        (network(service_cidr="10.0.0.0/16"), "service_cidr='10.0.0.0/16': overlaps cidr=10.0.0.0/16"),
        (network(service_cidr="8.0.0.0/16"), "must be a private network from /12 to /24"),
        (
            {"network": {"cidr": "10.0.0.0/22"}, "gpu": {"nodes": 20}},
            "network.cidr='10.0.0.0/22': gives the training subnet 256 addresses; 21 nodes need 349",
        ),
        (
            network(
                existing={
                    "vpc_id": "vpc-0123456789abcdef0",
                    "training_subnet_id": "subnet-0123456789abcdef0",
                    "control_plane_subnet_ids": ["subnet-0123456789abcdef0"],
                }
            ),
            "needs one subnet for each of us-west-2b, us-west-2c",
        ),
        ({"system": {"nodes": 1}}, "cluster.system.nodes=1: must be from 2 to 10"),
        ({"operations": {"alarm_email": "nobody"}}, "alarm_email='nobody': must be an e-mail address"),
        ({"operations": {"log_retention_days": 8}}, "log_retention_days=8: must be one of"),
    ],
)
def test_wrong_settings_are_refused_with_field_rule_and_fix(changes: Changes, message: str) -> None:
    assert message in problems(changes)


def test_all_wrong_fields_are_reported_at_once() -> None:
    text = problems({"kubernetes_version": "1.28", "storage": {"capacity_gib": 0}, "gpu": {"spares": 9}})

    assert len(text.splitlines()) >= 2


def test_committed_settings_are_valid() -> None:
    config = load({})

    assert config.gpu.instance_type == "p5.48xlarge"
    assert config.zones == ("us-west-2b", "us-west-2c")


def test_training_zone_that_cannot_host_the_control_plane_only_trains() -> None:
    # GIVEN p5 is offered in use1-az3, an EKS control plane is not
    changes = {
        "region": "us-east-1",
        "network": {
            "training_zone": {"name": "us-east-1e", "id": "use1-az3"},
            "control_plane_zones": [{"name": "us-east-1a"}, {"name": "us-east-1b"}],
        },
    }

    # WHEN
    config = load(changes)

    # THEN
    assert [zone.name for zone in config.network.cluster_zones] == ["us-east-1a", "us-east-1b"]
    assert config.zones == ("us-east-1e", "us-east-1a", "us-east-1b")


def test_old_version_can_be_had_with_extended_support() -> None:
    changes = {"kubernetes_version": "1.33", "support": "extended", "in_cluster_software": "render"}

    assert load(changes).kubernetes_version == "1.33"


def test_block_is_drained_an_hour_before_its_end() -> None:
    drain_at = load({"gpu": {"spares": 0, "capacity": BLOCK}}).gpu.capacity.drain_at

    assert drain_at == datetime(2026, 12, 14, 10, 30, tzinfo=UTC)


@pytest.mark.parametrize("principal", ["role/Admin", "user/eve", "arn:aws:iam::111122223333:role/path/Admin"])
def test_admins_may_be_short_or_full(principal: str) -> None:
    assert load({"access": {"admins": [principal]}}).access.admins == (principal,)


@pytest.mark.parametrize(
    ("context", "message"),
    [
        (None, "cluster: is missing from the CDK context"),
        ("{", "cluster='{': must be JSON"),
        ("[]", "cluster=[]: must be a table"),
        (7, "cluster=7: must be a table"),
        ({}, "cluster.region: is required"),
    ],
)
def test_context_that_is_no_table_is_refused(context: object, message: str) -> None:
    with pytest.raises(ConfigError) as error:
        from_context(context)

    assert message in str(error.value)


def test_context_may_come_as_text_from_the_command_line() -> None:
    assert from_context(json.dumps(CONTEXT["cluster"])) == from_context(CONTEXT["cluster"])


def test_schema_of_editors_is_current() -> None:
    committed = json.loads((ROOT / "stacks" / "cluster.schema.json").read_text())

    assert committed == json_schema(), "run `python -m stacks.config > stacks/cluster.schema.json`"


def test_schema_forbids_unknown_keys_and_explains_fields() -> None:
    gpu_schema = json_schema()["properties"]["gpu"]

    assert gpu_schema["additionalProperties"] is False
    assert "Hot-spare" in gpu_schema["properties"]["spares"]["description"]


def test_settings_can_be_read_without_aws_cdk() -> None:
    script = "import sys, stacks.config, stacks.manifests; print('aws_cdk' in sys.modules)"
    path = f"{ROOT / 'constructs'}:{ROOT}"
    done = subprocess.run(
        [sys.executable, "-c", script], env={"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )

    assert done.stdout.strip() == "False"
