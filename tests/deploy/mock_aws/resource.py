"""A resource type of CloudFormation that is made through the API of its service.

moto answers these calls in the same process. botocore checks every parameter against the service's model
on the way, so a misspelt or mistyped property fails here as it would on AWS.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any, ClassVar, Self

import boto3
from moto.core.common_models import CloudFormationModel

Properties = dict[str, Any]


class ResourceError(Exception):
    """What the service answers where moto would let it pass, or the rehearsal has no answer."""


def camel(value: Any) -> Any:
    """Return a value with keys in CloudFormation's spelling in that of EKS and CodeBuild."""
    if isinstance(value, list):
        return [camel(item) for item in value]
    if isinstance(value, Mapping):
        return {key[0].lower() + key[1:]: camel(item) for key, item in value.items()}
    return value


def tag_table(tags: list[dict[str, str]]) -> dict[str, str]:
    return {tag["Key"]: tag["Value"] for tag in tags}


class Resource(CloudFormationModel):  # type: ignore[misc]  # moto has no types
    """One resource. Subclasses say how it is made, changed and deleted."""

    TYPE: ClassVar[str] = ""

    def __init__(self, name: str, properties: Properties, *, account: str, region: str) -> None:
        self.generated_name = name
        self.properties = properties
        self.account, self.region = account, region
        self.physical_id = name
        self.attributes: dict[str, Any] = {}

    def create(self) -> None:
        """Make it; set `physical_id` and `attributes`."""
        raise NotImplementedError

    def update(self, properties: Properties) -> None:
        """Change it from `self.properties` to `properties`."""
        raise ResourceError(f"{self.TYPE}: an update is not part of the rehearsal")

    def delete(self) -> None:
        """Delete it."""
        raise NotImplementedError

    def client(self, service: str) -> Any:
        return boto3.client(service, region_name=self.region)

    @property
    def physical_resource_id(self) -> str:
        return self.physical_id

    def is_created(self) -> bool:
        return True

    def get_cfn_attribute(self, attribute_name: str) -> Any:
        if attribute_name not in self.attributes:
            raise ResourceError(f"{self.TYPE}: the rehearsal knows no attribute {attribute_name}")
        return self.attributes[attribute_name]

    @staticmethod
    def cloudformation_name_type() -> None:
        return None

    @classmethod
    def cloudformation_type(cls) -> str:
        return cls.TYPE

    @classmethod
    def has_cfn_attr(cls, attr: str) -> bool:
        return True

    @classmethod
    def create_from_cloudformation_json(
        cls,
        resource_name: str,
        cloudformation_json: dict[str, Any],
        account_id: str,
        region_name: str,
        **_: Any,
    ) -> Self:
        resource = cls(
            resource_name, cloudformation_json["Properties"], account=account_id, region=region_name
        )
        resource.create()
        return resource

    @classmethod
    def update_from_cloudformation_json(
        cls,
        original_resource: Self,
        new_resource_name: str,
        cloudformation_json: dict[str, Any],
        account_id: str,
        region_name: str,
    ) -> Self:
        properties = cloudformation_json["Properties"]
        original_resource.update(properties)
        original_resource.properties = properties
        return original_resource
