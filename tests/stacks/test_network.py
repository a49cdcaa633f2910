from __future__ import annotations

from tests.stacks.conftest import Deployment


def test_zones_are_literal_and_the_training_zone_is_first(default: Deployment) -> None:
    # WHEN
    subnets = default.network.all("AWS::EC2::Subnet")

    # THEN nothing is looked up
    assert [s["AvailabilityZone"] for s in subnets[:2]] == ["us-west-2b", "us-west-2c"]
    assert "Fn::GetAZs" not in str(default.network.template)


def test_training_subnet_is_the_first_quarter(default: Deployment) -> None:
    # WHEN
    blocks = {s["CidrBlock"] for s in default.network.all("AWS::EC2::Subnet")}

    # THEN
    assert str(default.config.network.training_subnet) == "10.0.0.0/18"
    assert blocks == {"10.0.0.0/18", "10.0.64.0/18", "10.0.128.0/24", "10.0.129.0/24"}


def test_s3_is_reached_without_nat(default: Deployment) -> None:
    # WHEN
    endpoint = default.network.one("AWS::EC2::VPCEndpoint")

    # THEN
    assert endpoint["VpcEndpointType"] == "Gateway"
    assert ".s3" in str(endpoint["ServiceName"])


def test_all_traffic_is_logged_for_a_stated_time(default: Deployment) -> None:
    assert default.network.one("AWS::EC2::FlowLog")["TrafficType"] == "ALL"
    assert default.network.one("AWS::Logs::LogGroup")["RetentionInDays"] == 90


def test_public_subnets_give_no_public_addresses(default: Deployment) -> None:
    assert not any(s["MapPublicIpOnLaunch"] for s in default.network.all("AWS::EC2::Subnet"))


def test_interface_endpoints_are_optional(default: Deployment, everything: Deployment) -> None:
    # WHEN
    endpoints = everything.network.all("AWS::EC2::VPCEndpoint")

    # THEN
    names = str([e["ServiceName"] for e in endpoints if e["VpcEndpointType"] == "Interface"])
    assert all(name in names for name in ("ecr.dkr", "eks-auth", "sts", "ec2", "logs", "autoscaling"))
    assert len(default.network.all("AWS::EC2::VPCEndpoint")) == 1


def test_existing_network_is_used_and_not_changed(existing: Deployment) -> None:
    # WHEN
    kinds = {r["Type"] for r in existing.network.resources.values()}

    # THEN only security groups are added to it
    assert kinds == {
        "AWS::EC2::SecurityGroup",
        "AWS::EC2::SecurityGroupIngress",
        "AWS::EC2::SecurityGroupEgress",
    }
    group = existing.cluster.one("AWS::AutoScaling::AutoScalingGroup")
    assert group["VPCZoneIdentifier"] == ["subnet-0aaaaaaaaaaaaaaaa"]
    assert existing.storage.one("AWS::FSx::FileSystem")["SubnetIds"] == ["subnet-0aaaaaaaaaaaaaaaa"]
