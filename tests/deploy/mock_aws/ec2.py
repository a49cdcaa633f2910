"""EC2 and EC2 Auto Scaling: placement group, rules of security groups, Auto Scaling group."""

from __future__ import annotations

from typing import Any, ClassVar

from moto.core.responses import ActionResult, EmptyResult
from moto.ec2.responses import EC2Response

from tests.deploy.mock_aws.resource import Properties, Resource, ResourceError

_placement_groups: dict[str, dict[str, str]] = {}


class PlacementGroup(Resource):
    TYPE = "AWS::EC2::PlacementGroup"

    def create(self) -> None:
        tags = [{"ResourceType": "placement-group", "Tags": self.properties["Tags"]}]
        self.client("ec2").create_placement_group(
            GroupName=self.generated_name, Strategy=self.properties["Strategy"], TagSpecifications=tags
        )

    def delete(self) -> None:
        self.client("ec2").delete_placement_group(GroupName=self.physical_id)


class _Rule(Resource):
    DIRECTION: ClassVar[str]
    PEER: ClassVar[str]

    def create(self) -> None:
        properties = self.properties
        permission: Properties = {
            key: properties[key] for key in ("IpProtocol", "FromPort", "ToPort") if key in properties
        }
        peer = {"GroupId": properties[self.PEER], "Description": properties["Description"]}
        authorize = getattr(self.client("ec2"), f"authorize_security_group_{self.DIRECTION}")
        answer = authorize(
            GroupId=properties["GroupId"], IpPermissions=[{**permission, "UserIdGroupPairs": [peer]}]
        )
        self.physical_id = answer["SecurityGroupRules"][0]["SecurityGroupRuleId"]

    def delete(self) -> None:
        revoke = getattr(self.client("ec2"), f"revoke_security_group_{self.DIRECTION}")
        revoke(GroupId=self.properties["GroupId"], SecurityGroupRuleIds=[self.physical_id])


class Ingress(_Rule):
    TYPE = "AWS::EC2::SecurityGroupIngress"
    DIRECTION = "ingress"
    PEER = "SourceSecurityGroupId"


class Egress(_Rule):
    TYPE = "AWS::EC2::SecurityGroupEgress"
    DIRECTION = "egress"
    PEER = "DestinationSecurityGroupId"


class AutoScalingGroup(Resource):
    """moto's own replaces the group at each update."""

    TYPE = "AWS::AutoScaling::AutoScalingGroup"
    _ONLY_AT_CREATION = frozenset({"Tags", "MetricsCollection", "NotificationConfigurations"})

    def create(self) -> None:
        client = self.client("autoscaling")
        client.create_auto_scaling_group(
            AutoScalingGroupName=self.generated_name,
            Tags=[{**tag, "ResourceType": "auto-scaling-group"} for tag in self.properties["Tags"]],
            **self._parameters(self.properties),
        )
        for metrics in self.properties["MetricsCollection"]:
            client.enable_metrics_collection(AutoScalingGroupName=self.physical_id, **metrics)

    def update(self, properties: Properties) -> None:
        for name in self._ONLY_AT_CREATION:
            if properties[name] != self.properties[name]:
                raise ResourceError(f"{self.TYPE}: an update of {name} is not part of the rehearsal")
        self.client("autoscaling").update_auto_scaling_group(
            AutoScalingGroupName=self.physical_id, **self._parameters(properties)
        )

    def delete(self) -> None:
        self.client("autoscaling").delete_auto_scaling_group(
            AutoScalingGroupName=self.physical_id, ForceDelete=True
        )

    def _parameters(self, properties: Properties) -> dict[str, Any]:
        parameters = {key: value for key, value in properties.items() if key not in self._ONLY_AT_CREATION}
        sizes = {key: int(properties[key]) for key in ("MinSize", "MaxSize", "DesiredCapacity")}
        template = properties["LaunchTemplate"]
        return {
            **parameters,
            **sizes,
            "VPCZoneIdentifier": ",".join(properties["VPCZoneIdentifier"]),
            "LaunchTemplate": {**template, "Version": str(template["Version"])},
        }


def _create_placement_group(response: Any) -> ActionResult:
    name = response._get_param("GroupName")
    group = {"GroupName": name, "Strategy": response._get_param("Strategy"), "State": "available"}
    _placement_groups[name] = group
    return ActionResult({"PlacementGroup": group})


def _describe_placement_groups(_: Any) -> ActionResult:
    return ActionResult({"PlacementGroups": list(_placement_groups.values())})


def _delete_placement_group(response: Any) -> EmptyResult:
    del _placement_groups[response._get_param("GroupName")]
    return EmptyResult()


def install() -> None:
    """Let moto's server answer the operations of placement groups."""
    EC2Response.create_placement_group = _create_placement_group
    EC2Response.describe_placement_groups = _describe_placement_groups
    EC2Response.delete_placement_group = _delete_placement_group
