from __future__ import annotations

import aws_cdk as cdk
import pytest
from aws_cdk import aws_ec2 as ec2
from aws_cdk import aws_eks_v2 as eks
from constructs import Construct

ZONES = ["us-west-2b", "us-west-2c"]


@pytest.fixture
def stack() -> cdk.Stack:
    app = cdk.App(builtin_cloud_formation_validation=False)
    environment = cdk.Environment(account="111122223333", region="us-west-2")
    return cdk.Stack(app, "Test", env=environment)


@pytest.fixture
def imported(stack: cdk.Stack) -> Construct:
    """What a construct is given, made outside the stack under test."""
    return Construct(stack, "Imported")


@pytest.fixture
def vpc(imported: Construct) -> ec2.IVpc:
    return ec2.Vpc.from_vpc_attributes(
        imported,
        "Vpc",
        vpc_id="vpc-11111111",
        vpc_cidr_block="10.0.0.0/16",
        availability_zones=ZONES,
        private_subnet_ids=["subnet-1111aaaa", "subnet-2222bbbb"],
    )


@pytest.fixture
def subnet(vpc: ec2.IVpc) -> ec2.ISubnet:
    return vpc.private_subnets[0]


@pytest.fixture
def efa_group(imported: Construct) -> ec2.ISecurityGroup:
    return ec2.SecurityGroup.from_security_group_id(imported, "Efa", "sg-00000efa")


@pytest.fixture
def cluster(imported: Construct, vpc: ec2.IVpc) -> eks.ICluster:
    return eks.Cluster.from_cluster_attributes(
        imported,
        "Cluster",
        cluster_name="holdfast",
        vpc=vpc,
        cluster_endpoint="https://EXAMPLE.gr7.us-west-2.eks.amazonaws.com",
        cluster_certificate_authority_data="Q0VSVA==",
        cluster_security_group_id="sg-0c105e55",
        kubectl_provider=eks.KubectlProvider.from_kubectl_provider_attributes(
            imported, "Kubectl", service_token="arn:aws:lambda:us-west-2:111122223333:function:kubectl"
        ),
    )
