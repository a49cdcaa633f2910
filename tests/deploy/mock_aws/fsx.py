"""FSx for Lustre: file system and data repository association, with the API of the latter."""

from __future__ import annotations

import json
import uuid
from typing import Any

from moto.fsx.models import fsx_backends
from moto.fsx.responses import FSxResponse

from tests.deploy.mock_aws.resource import Resource, ResourceError

_LUSTRE_PORT = 988
_associations: dict[str, dict[str, Any]] = {}


class FileSystem(Resource):
    TYPE = "AWS::FSx::FileSystem"

    def create(self) -> None:
        self._check_security_groups()
        answer = self.client("fsx").create_file_system(
            ClientRequestToken=str(uuid.uuid4()), **self.properties
        )
        self.physical_id = answer["FileSystem"]["FileSystemId"]
        made = fsx_backends[self.account][self.region].file_systems[self.physical_id]
        # moto leaves it out
        made.lustre_configuration["MountName"] = self.physical_id[-8:]
        self.attributes = {"DNSName": made.dns_name, "LustreMountName": self.physical_id[-8:]}

    def delete(self) -> None:
        self.client("fsx").delete_file_system(FileSystemId=self.physical_id)

    def _check_security_groups(self) -> None:
        answer = self.client("ec2").describe_security_groups(GroupIds=self.properties["SecurityGroupIds"])
        rules = [rule for group in answer["SecurityGroups"] for rule in group["IpPermissions"]]
        if not any(rule.get("FromPort", 0) <= _LUSTRE_PORT <= rule.get("ToPort", 65535) for rule in rules):
            raise ResourceError(f"no security group permits Lustre LNET traffic on port {_LUSTRE_PORT}")


class DataRepositoryAssociation(Resource):
    TYPE = "AWS::FSx::DataRepositoryAssociation"

    def create(self) -> None:
        answer = self.client("fsx").create_data_repository_association(
            ClientRequestToken=str(uuid.uuid4()), **self.properties
        )
        self.physical_id = answer["Association"]["AssociationId"]

    def delete(self) -> None:
        self.client("fsx").delete_data_repository_association(
            AssociationId=self.physical_id, ClientRequestToken=str(uuid.uuid4())
        )


def _create_association(response: Any) -> str:
    request = json.loads(response.body)
    if request["FileSystemId"] not in response.fsx_backend.file_systems:
        raise ResourceError(f"no file system {request['FileSystemId']}")
    association = {"AssociationId": f"dra-{uuid.uuid4().hex[:17]}", "Lifecycle": "AVAILABLE"}
    kept = ("FileSystemId", "FileSystemPath", "DataRepositoryPath", "S3")
    association |= {key: request[key] for key in kept if key in request}
    _associations[association["AssociationId"]] = association
    return json.dumps({"Association": association})


def _describe_associations(_: Any) -> str:
    return json.dumps({"Associations": list(_associations.values())})


def _delete_association(response: Any) -> str:
    association = _associations.pop(json.loads(response.body)["AssociationId"])
    return json.dumps({"AssociationId": association["AssociationId"], "Lifecycle": "DELETING"})


def install() -> None:
    """Let moto's server answer the operations of associations."""
    FSxResponse.create_data_repository_association = _create_association
    FSxResponse.describe_data_repository_associations = _describe_associations
    FSxResponse.delete_data_repository_association = _delete_association
