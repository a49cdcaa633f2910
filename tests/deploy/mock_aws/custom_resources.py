"""What custom resources do, without a Lambda runtime.

The kubectl provider's handler is Python: it runs as the deploy uploaded it. The others are JavaScript, and
what they do is done here.
"""

from __future__ import annotations

import contextlib
import json
from typing import Any

from botocore import xform_name
from botocore.exceptions import ClientError

from tests.deploy.mock_aws import kubectl_provider
from tests.deploy.mock_aws.resource import Properties, Resource


class SdkCall(Resource):
    """`AwsCustomResource`: the call stands in the template."""

    TYPE = "Custom::*"

    def create(self) -> None:
        self._call(self.properties.get("Create"))

    def update(self, properties: Properties) -> None:
        self._call(properties.get("Update"))

    def delete(self) -> None:
        self._call(self.properties.get("Delete"))

    def _call(self, text: str | None) -> None:
        if text is None:
            return
        call = json.loads(text)
        client = self.client(call["service"].lower())
        getattr(client, xform_name(call["action"]))(**call["parameters"])
        self.physical_id = call["physicalResourceId"]["id"]


class StartImageBuild(SdkCall):
    TYPE = "Custom::StartImageBuild"


class SuspendProcesses(SdkCall):
    TYPE = "Custom::SuspendProcesses"


class RestrictDefaultSecurityGroup(Resource):
    """Takes the rules from a VPC's default group, and puts them back when it goes."""

    TYPE = "Custom::VpcRestrictDefaultSG"

    def create(self) -> None:
        # as the handler does: rules that are not there are no error
        with contextlib.suppress(ClientError):
            self.client("ec2").revoke_security_group_egress(**self._egress)
        with contextlib.suppress(ClientError):
            self.client("ec2").revoke_security_group_ingress(**self._ingress)

    def delete(self) -> None:
        self.client("ec2").authorize_security_group_ingress(**self._ingress)
        self.client("ec2").authorize_security_group_egress(**self._egress)

    @property
    def _ingress(self) -> dict[str, Any]:
        group_id = self.properties["DefaultSecurityGroupId"]
        pairs = [{"GroupId": group_id, "UserId": self.properties["Account"]}]
        return {
            "GroupId": group_id,
            "IpPermissions": [{"IpProtocol": "-1", "UserIdGroupPairs": pairs}],
        }

    @property
    def _egress(self) -> dict[str, Any]:
        return {
            "GroupId": self.properties["DefaultSecurityGroupId"],
            "IpPermissions": [{"IpProtocol": "-1", "IpRanges": [{"CidrIp": "0.0.0.0/0"}]}],
        }


class KubernetesManifest(Resource):
    TYPE = "Custom::AWSCDK-EKS-KubernetesResource"

    def create(self) -> None:
        self._handle("Create", self.properties)

    def update(self, properties: Properties) -> None:
        self._handle("Update", properties)

    def delete(self) -> None:
        self._handle("Delete", self.properties)

    def _handle(self, request: str, properties: Properties) -> None:
        event = {
            "RequestType": request,
            "ResourceType": self.TYPE,
            "ResourceProperties": {key: _as_text(value) for key, value in properties.items()},
        }
        function = self._handler_function(properties["ServiceToken"])
        kubectl_provider.handle(event, code=function)

    def _handler_function(self, framework_arn: str) -> bytes:
        from moto.awslambda.utils import get_backend

        functions = get_backend(self.account, self.region)
        framework = functions.get_function(framework_arn)
        handler = functions.get_function(framework.environment_vars["USER_ON_EVENT_FUNCTION_ARN"])
        code: bytes = handler.code_bytes
        return code


def _as_text(value: Any) -> Any:
    # CloudFormation hands all properties of a custom resource over as text
    return str(value).lower() if isinstance(value, bool) else value
