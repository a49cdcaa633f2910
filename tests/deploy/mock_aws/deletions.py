"""How resources of moto's own types are deleted; for many of them moto forgets it."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import boto3

from tests.deploy.mock_aws.resource import ResourceError

Client = Callable[[str], Any]
Properties = Mapping[str, Any]

_DELETIONS: dict[str, Callable[[Client, Any, Properties], object]] = {
    "AWS::EC2::EIP": lambda aws, made, _: aws("ec2").release_address(AllocationId=made.allocation_id),
    "AWS::EC2::FlowLog": lambda aws, made, _: aws("ec2").delete_flow_logs(FlowLogIds=[made.id]),
    "AWS::EC2::InternetGateway": lambda aws, made, _: aws("ec2").delete_internet_gateway(
        InternetGatewayId=made.id
    ),
    "AWS::EC2::NatGateway": lambda aws, made, _: aws("ec2").delete_nat_gateway(NatGatewayId=made.id),
    "AWS::EC2::Route": lambda aws, _, properties: aws("ec2").delete_route(
        RouteTableId=properties["RouteTableId"], DestinationCidrBlock=properties["DestinationCidrBlock"]
    ),
    "AWS::EC2::RouteTable": lambda aws, made, _: aws("ec2").delete_route_table(RouteTableId=made.id),
    "AWS::EC2::SubnetRouteTableAssociation": lambda aws, made, properties: _disassociate(aws, properties),
    "AWS::EC2::VPCEndpoint": lambda aws, made, _: aws("ec2").delete_vpc_endpoints(VpcEndpointIds=[made.id]),
    "AWS::EC2::VPCGatewayAttachment": lambda aws, _, properties: aws("ec2").detach_internet_gateway(
        InternetGatewayId=properties["InternetGatewayId"], VpcId=properties["VpcId"]
    ),
    "AWS::Lambda::LayerVersion": lambda aws, made, _: aws("lambda").delete_layer_version(
        LayerName=made.name, VersionNumber=made.version
    ),
}


def delete_native(made: Any, applied: Mapping[str, Any], *, account: str, region: str) -> None:
    """Delete a resource that moto's own model made."""
    kind = applied["Type"]
    properties = applied.get("Properties", {})
    if kind in _DELETIONS:
        _DELETIONS[kind](lambda service: boto3.client(service, region_name=region), made, properties)
    elif hasattr(made, "delete"):
        made.delete(account, region)
    elif not hasattr(made.delete_from_cloudformation_json, "__isabstractmethod__"):
        made.delete_from_cloudformation_json(
            made.physical_resource_id, {"Type": kind, "Properties": properties}, account, region
        )
    else:
        raise ResourceError(f"{kind}: moto cannot delete it")


def _disassociate(aws: Client, properties: Properties) -> None:
    tables = aws("ec2").describe_route_tables(RouteTableIds=[properties["RouteTableId"]])["RouteTables"]
    for association in tables[0]["Associations"]:
        if association.get("SubnetId") == properties["SubnetId"]:
            aws("ec2").disassociate_route_table(AssociationId=association["RouteTableAssociationId"])
