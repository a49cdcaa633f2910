"""The doctor's account checks against moto, with the calls that it lacks added (aws_calls.py)."""

from __future__ import annotations

import dataclasses
import datetime
import json
from collections.abc import Iterator
from typing import Any

import boto3
import pytest
from moto import mock_aws

from k8s.before_deploy import (
    Account,
    check_access,
    check_capacity,
    check_existing_subnet,
    check_identity,
    check_kubernetes_version,
    check_offering,
    check_quotas,
    check_zones,
)
from k8s.doctor import load_cluster, run_checks
from k8s.findings import Finding
from k8s.images import check_images
from k8s.outputs import StackOutputs
from stacks.config import AccessConfig, CapacityConfig, ClusterConfig, ExistingNetwork, Zone
from tests.k8s.aws_calls import AwsCalls
from tests.k8s.conftest import ROOT

RESERVATION = "cr-0123456789abcdef0"


@pytest.fixture
def config() -> ClusterConfig:
    return load_cluster(ROOT / "cdk.json")


@pytest.fixture
def session(monkeypatch: pytest.MonkeyPatch) -> Iterator[boto3.Session]:
    for name in ("AWS_ACCESS_KEY_ID", "AWS_SECRET_ACCESS_KEY"):
        monkeypatch.setenv(name, "testing")
    monkeypatch.delenv("AWS_PROFILE", raising=False)
    with mock_aws():
        yield boto3.Session()


@pytest.fixture
def aws(session: boto3.Session, monkeypatch: pytest.MonkeyPatch) -> AwsCalls:
    return AwsCalls(monkeypatch)


def with_network(config: ClusterConfig, **fields: Any) -> ClusterConfig:
    return dataclasses.replace(config, network=dataclasses.replace(config.network, **fields))


def with_capacity(config: ClusterConfig, capacity: CapacityConfig) -> ClusterConfig:
    return dataclasses.replace(config, gpu=dataclasses.replace(config.gpu, capacity=capacity))


def failures(findings: Iterator[Finding]) -> list[str]:
    return [f"{finding.message}; {finding.fix}" for finding in findings if finding.level == "FAIL"]


def test_identity(config: ClusterConfig, session: boto3.Session) -> None:
    assert not failures(check_identity(Account(config=config, session=session)))
    other = dataclasses.replace(config, account="999999999999")
    (found,) = failures(check_identity(Account(config=other, session=session)))
    assert "the cluster is for 999999999999; choose another AWS_PROFILE" in found


def with_access(config: ClusterConfig, *admins: str, public_cidr: str = "198.18.5.0/24") -> ClusterConfig:
    return dataclasses.replace(config, access=AccessConfig(admins=admins, public_cidrs=(public_cidr,)))


def test_access_of_the_example_lets_nobody_in(config: ClusterConfig, session: boto3.Session) -> None:
    assert failures(check_access(Account(config=config, session=session))) == [
        "203.0.113.0/24 is an address of documentation, which nobody has; "
        'set access.public_cidrs to your network, or access.endpoint to "private"',
        "role/PlatformAdmin does not exist; set access.admins to the role that you use",
    ]


def test_access_of_roles_and_users_that_exist(config: ClusterConfig, session: boto3.Session) -> None:
    # GIVEN
    iam, account_id = session.client("iam"), session.client("sts").get_caller_identity()["Account"]
    iam.create_role(RoleName="Platform", Path="/teams/", AssumeRolePolicyDocument="{}")
    iam.create_user(UserName="ada")
    own = with_access(config, f"arn:aws:iam::{account_id}:role/teams/Platform", "user/ada")

    # THEN
    findings = list(check_access(Account(config=own, session=session)))
    assert [finding.level for finding in findings] == ["OK", "OK"]
    (gone,) = failures(check_access(Account(config=with_access(config, "user/bob"), session=session)))
    assert gone.startswith("user/bob does not exist")


def test_access_of_another_account_cannot_be_seen(config: ClusterConfig, session: boto3.Session) -> None:
    other = with_access(config, "arn:aws:iam::999999999999:role/Platform")
    (finding,) = check_access(Account(config=other, session=session))
    assert finding.level == "WARN"


def test_zone_names_are_translated_to_ids(config: ClusterConfig, session: boto3.Session) -> None:
    findings = list(check_zones(Account(config=config, session=session)))
    ec2 = session.client("ec2", region_name="us-west-2")
    ids = {z["ZoneName"]: z["ZoneId"] for z in ec2.describe_availability_zones()["AvailabilityZones"]}
    assert findings[0].message == f"us-west-2b is {ids['us-west-2b']}"


def test_a_zone_with_another_id_fails(config: ClusterConfig, session: boto3.Session) -> None:
    wrong = with_network(config, training_zone=Zone(name="us-west-2b", id="usw2-az9"))
    (found,) = failures(check_zones(Account(config=wrong, session=session)))
    assert "not usw2-az9" in found


def test_a_zone_without_control_planes_fails(config: ClusterConfig, session: boto3.Session) -> None:
    # GIVEN the zone of us-east-1 that use1-az3 is for moto's account, and one that hosts control planes
    ec2 = session.client("ec2", region_name="us-east-1")
    names = {z["ZoneId"]: z["ZoneName"] for z in ec2.describe_availability_zones()["AvailabilityZones"]}
    there = dataclasses.replace(config, region="us-east-1")
    other = (Zone(name=names["use1-az1"]),)
    there = with_network(there, training_zone=Zone(name=names["use1-az3"]), control_plane_zones=other)
    # THEN
    (found,) = failures(check_zones(Account(config=there, session=session)))
    assert "is use1-az3, which hosts no EKS control plane" in found


def test_offering(config: ClusterConfig, session: boto3.Session) -> None:
    assert not failures(check_offering(Account(config=config, session=session)))
    rare = dataclasses.replace(config, gpu=dataclasses.replace(config.gpu, instance_type="p5e.48xlarge"))
    (found,) = failures(check_offering(Account(config=rare, session=session)))
    assert found == "p5e.48xlarge is not offered in us-west-2b; use us-west-2c"


def reservation(**fields: Any) -> dict[str, Any]:
    found = {
        "CapacityReservationId": RESERVATION,
        "State": "active",
        "AvailabilityZone": "us-west-2b",
        "InstanceType": "p5.48xlarge",
        "TotalInstanceCount": 3,
        "AvailableInstanceCount": 3,
    }
    return {**found, **fields}


def test_a_fitting_reservation(config: ClusterConfig, session: boto3.Session, aws: AwsCalls) -> None:
    reserved = with_capacity(config, CapacityConfig(mode="reservation", reservation_id=RESERVATION))
    aws.reservations(reservation())
    assert not failures(check_capacity(Account(config=reserved, session=session)))


def test_a_reservation_that_fits_in_nothing(
    config: ClusterConfig, session: boto3.Session, aws: AwsCalls
) -> None:
    reserved = with_capacity(config, CapacityConfig(mode="reservation", reservation_id=RESERVATION))
    wrong = reservation(
        State="expired", AvailabilityZone="us-west-2a", InstanceType="p4d.24xlarge", TotalInstanceCount=1
    )
    aws.reservations(wrong)
    found = failures(check_capacity(Account(config=reserved, session=session)))
    assert [message.split("; ")[0] for message in found] == [
        f"{RESERVATION} is expired",
        "it is in us-west-2a, the training zone is us-west-2b",
        "it is for p4d.24xlarge, not p5.48xlarge",
        "instances in it: 1, needed 3",
    ]


def test_a_reservation_that_nobody_knows(
    config: ClusterConfig, session: boto3.Session, aws: AwsCalls
) -> None:
    reserved = with_capacity(config, CapacityConfig(mode="reservation", reservation_id=RESERVATION))
    aws.reservations()
    (found,) = failures(check_capacity(Account(config=reserved, session=session)))
    assert found == f"{RESERVATION} does not exist; check gpu.capacity.reservation_id and the region"


def test_a_block_that_ends_at_another_time(
    config: ClusterConfig, session: boto3.Session, aws: AwsCalls
) -> None:
    capacity = CapacityConfig(mode="capacity-block", reservation_id=RESERVATION, end="2026-12-09T11:30:00Z")
    end = datetime.datetime(2026, 12, 8, 11, 30, tzinfo=datetime.UTC)
    aws.reservations(reservation(State="scheduled", EndDate=end))
    (found,) = failures(check_capacity(Account(config=with_capacity(config, capacity), session=session)))
    assert found.endswith("set gpu.capacity.end to 2026-12-08T11:30:00Z")


def test_quotas_of_a_new_account(config: ClusterConfig, session: boto3.Session, aws: AwsCalls) -> None:
    aws.quotas(5.0)
    found = failures(check_quotas(Account(config=config, session=session)))
    assert found[0].startswith(
        "Running On-Demand P instances, vCPU: 5, needed 576; aws service-quotas request"
    )
    assert "--quota-code L-417A185B --desired-value 576" in found[0]
    assert found[1].startswith("Running On-Demand Standard instances, vCPU: 5, needed 8")
    assert found[2].startswith("Lustre Scratch capacity, GiB: 5, needed 1200")


def test_what_is_there_already_counts_against_the_quota(
    config: ClusterConfig, session: boto3.Session, aws: AwsCalls
) -> None:
    ec2 = session.client("ec2", region_name="us-west-2")
    for _ in range(4):
        ec2.create_vpc(CidrBlock="10.0.0.0/16")  # beside the default one
        ec2.allocate_address(Domain="vpc")
    aws.quotas(5.0)
    findings = {f.message.split(":")[0]: f for f in check_quotas(Account(config=config, session=session))}
    assert findings["VPCs per Region"].level == "FAIL"
    assert findings["VPCs per Region"].message.endswith("5, needed 6")
    assert findings["Elastic IP addresses"].level == "OK"


def test_a_quota_without_a_value_is_a_warning(config: ClusterConfig, session: boto3.Session) -> None:
    levels = {f.name: f.level for f in check_quotas(Account(config=config, session=session))}
    assert levels["quota L-417A185B"] == levels["quota L-AD2FC696"] == "WARN"


@pytest.mark.parametrize(
    ("status", "support", "message"),
    [
        ("STANDARD_SUPPORT", "standard", ""),
        ("EXTENDED_SUPPORT", "extended", ""),
        ("EXTENDED_SUPPORT", "standard", "1.36 has left standard support"),
        ("UNSUPPORTED", "standard", "EKS no longer creates 1.36; use one of 1.40"),
    ],
)
def test_kubernetes_version(
    config: ClusterConfig, session: boto3.Session, aws: AwsCalls, status: str, support: Any, message: str
) -> None:
    versions = {"1.36": status, "1.40": "STANDARD_SUPPORT"}
    aws.cluster_versions(versions)
    supported = dataclasses.replace(config, support=support)
    found = failures(check_kubernetes_version(Account(config=supported, session=session)))
    assert len(found) == bool(message)
    assert all(message in failure for failure in found)


def test_room_in_an_existing_subnet(config: ClusterConfig, session: boto3.Session) -> None:
    ec2 = session.client("ec2", region_name="us-west-2")
    vpc = ec2.create_vpc(CidrBlock="10.0.0.0/16")["Vpc"]["VpcId"]
    small = ec2.create_subnet(VpcId=vpc, CidrBlock="10.0.0.0/28", AvailabilityZone="us-west-2a")["Subnet"]
    existing = ExistingNetwork(
        vpc_id=vpc, training_subnet_id=small["SubnetId"], control_plane_subnet_ids=("subnet-01234567",) * 2
    )
    account = Account(config=with_network(config, existing=existing), session=session)
    found = failures(check_existing_subnet(account))
    assert [message.split("; ")[1] for message in found] == [
        "name a subnet of the training zone",
        "use a larger subnet",
    ]


def test_a_subnet_that_nobody_knows(config: ClusterConfig, session: boto3.Session) -> None:
    existing = ExistingNetwork(
        vpc_id="vpc-01234567",
        training_subnet_id="subnet-01234567",
        control_plane_subnet_ids=("subnet-01234567",) * 2,
    )
    account = Account(config=with_network(config, existing=existing), session=session)
    (found,) = failures(check_existing_subnet(account))
    assert found.startswith("subnet-01234567 does not exist")


def test_images(outputs: StackOutputs, session: boto3.Session) -> None:
    ecr = session.client("ecr", region_name="us-west-2")
    ecr.create_repository(repositoryName="holdfast/trainer")
    media_type = "application/vnd.oci.image.manifest.v1+json"
    config = {"mediaType": "application/vnd.oci.image.config.v1+json", "digest": "sha256:1", "size": 2}
    manifest = {"schemaVersion": 2, "mediaType": media_type, "config": config, "layers": []}
    ecr.put_image(repositoryName="holdfast/trainer", imageManifest=json.dumps(manifest), imageTag="0.1.0")
    here = dataclasses.replace(outputs, control_image="quay.io/someone/control:1")
    there, elsewhere = check_images(here, session)
    assert there.level == "OK"
    assert elsewhere.level == "WARN"
    missing = next(check_images(dataclasses.replace(outputs, trainer_image=outputs.control_image), session))
    assert missing.level == "FAIL"
    assert "CodeBuild" in missing.fix


def test_all_checks_run_and_a_refused_one_hides_no_other(
    config: ClusterConfig, session: boto3.Session, aws: AwsCalls
) -> None:
    aws.no_quotas("AccessDeniedException", "not allowed")
    aws.cluster_versions({})
    findings = list(run_checks(Account(config=config, session=session).checks()))
    assert {finding.name for finding in findings} >= {"account", "zone", "offering", "aws", "kubernetes"}
    assert "not allowed" in next(finding.message for finding in findings if finding.name == "aws")
