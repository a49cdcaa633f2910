"""Network: VPC, the training subnet, the control plane's subnets, security groups."""

from __future__ import annotations

from collections.abc import Sequence
from ipaddress import IPv4Network
from typing import Any

import aws_cdk as cdk
from aws_cdk import aws_ec2 as ec2
from constructs import Construct

from eks_training.efa_security_group import EfaSecurityGroup
from eks_training.lustre_security_group import LustreSecurityGroup
from stacks import rules
from stacks.config import ClusterConfig, ExistingNetwork
from stacks.log_groups import log_group
from stacks.outputs import write_outputs

_SMALLEST_SUBNET = 28
_PUBLIC_SUBNET_BITS = 8

# what nodes need when their way to AWS should not leave the VPC
_INTERFACE_ENDPOINTS = {
    "Ecr": ec2.InterfaceVpcEndpointAwsService.ECR,
    "EcrDocker": ec2.InterfaceVpcEndpointAwsService.ECR_DOCKER,
    "Ec2": ec2.InterfaceVpcEndpointAwsService.EC2,
    "Eks": ec2.InterfaceVpcEndpointAwsService.EKS,
    "EksAuth": ec2.InterfaceVpcEndpointAwsService.EKS_AUTH,
    "Sts": ec2.InterfaceVpcEndpointAwsService.STS,
    "Logs": ec2.InterfaceVpcEndpointAwsService.CLOUDWATCH_LOGS,
    "AutoScaling": ec2.InterfaceVpcEndpointAwsService.AUTOSCALING,
}


class NetworkStack(cdk.Stack):
    """Everything that the file system and the cluster stand on."""

    vpc: ec2.IVpc
    training_subnet: ec2.ISubnet
    """Holds the GPU nodes, the system nodes and the file system."""
    cluster_subnets: Sequence[ec2.ISubnet]
    """Hold the control plane's interfaces."""

    def __init__(self, scope: Construct, construct_id: str, *, config: ClusterConfig, **kwargs: Any) -> None:
        self._zones = config.zones
        super().__init__(scope, construct_id, **kwargs)
        if config.network.existing:
            self._use_existing(config, config.network.existing)
        else:
            self._make(config)
        self.efa = EfaSecurityGroup(self, "Efa", vpc=self.vpc).security_group
        self.lustre = LustreSecurityGroup(self, "Lustre", vpc=self.vpc).security_group
        write_outputs(self, {"Region": self.region, "AvailabilityZone": config.network.training_zone.name})

    @property
    def availability_zones(self) -> list[str]:
        """Return literal zones. CDK's own answer is a lookup in the account, or `Fn::GetAZs`."""
        return list(self._zones)

    def _make(self, config: ClusterConfig) -> None:
        flow_logs = log_group(self, "FlowLogs", days=config.operations.log_retention_days)
        vpc = ec2.Vpc(
            self,
            "Vpc",
            ip_addresses=ec2.IpAddresses.cidr(config.network.cidr),
            max_azs=len(config.zones),
            nat_gateways=1,
            subnet_configuration=_subnets(IPv4Network(config.network.cidr)),
            gateway_endpoints={
                "S3": ec2.GatewayVpcEndpointOptions(service=ec2.GatewayVpcEndpointAwsService.S3)
            },
            flow_logs={
                "All": ec2.FlowLogOptions(destination=ec2.FlowLogDestination.to_cloud_watch_logs(flow_logs))
            },
        )
        self.vpc = vpc
        self.training_subnet = vpc.private_subnets[0]
        names = [zone.name for zone in config.network.cluster_zones]
        self.cluster_subnets = [subnet for subnet in vpc.private_subnets if subnet.availability_zone in names]
        if config.network.interface_endpoints:
            self._add_interface_endpoints(vpc, config.network.cidr)

    def _add_interface_endpoints(self, vpc: ec2.Vpc, cidr: str) -> None:
        # one group with a literal network: CDK's own would name it by a reference, which cdk-nag cannot read
        group = ec2.SecurityGroup(
            self, "Endpoints", vpc=vpc, description="Interface endpoints", allow_all_outbound=False
        )
        group.add_ingress_rule(ec2.Peer.ipv4(cidr), ec2.Port.tcp(443), "from the VPC")
        for name, service in _INTERFACE_ENDPOINTS.items():
            vpc.add_interface_endpoint(name, service=service, security_groups=[group], open=False)

    def _use_existing(self, config: ClusterConfig, network: ExistingNetwork) -> None:
        zones = [zone.name for zone in config.network.cluster_zones]
        self.vpc = ec2.Vpc.from_vpc_attributes(
            self,
            "Vpc",
            vpc_id=network.vpc_id,
            vpc_cidr_block=config.network.cidr,
            availability_zones=zones,
            private_subnet_ids=list(network.control_plane_subnet_ids),
        )
        self.cluster_subnets = self.vpc.private_subnets
        self.training_subnet = ec2.Subnet.from_subnet_attributes(
            self,
            "TrainingSubnet",
            subnet_id=network.training_subnet_id,
            availability_zone=config.network.training_zone.name,
        )


def _subnets(vpc: IPv4Network) -> list[ec2.SubnetConfiguration]:
    # private first: the training subnet is then the first quarter of the VPC, as config.py says
    private = ec2.SubnetConfiguration(
        name="Private",
        subnet_type=ec2.SubnetType.PRIVATE_WITH_EGRESS,
        cidr_mask=vpc.prefixlen + rules.PRIVATE_SUBNET_BITS,
    )
    public = ec2.SubnetConfiguration(
        name="Public",
        subnet_type=ec2.SubnetType.PUBLIC,
        cidr_mask=min(vpc.prefixlen + _PUBLIC_SUBNET_BITS, _SMALLEST_SUBNET),
        map_public_ip_on_launch=False,
    )
    return [private, public]
