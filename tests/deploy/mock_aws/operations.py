"""Alarm, topic policy, budget, image build, parameter, bucket policy, key."""

from __future__ import annotations

import json
from typing import Any

from tests.deploy.mock_aws.resource import Resource, camel

_WITHOUT_TLS = {"Bool": {"aws:SecureTransport": "false"}}


class Alarm(Resource):
    TYPE = "AWS::CloudWatch::Alarm"

    def create(self) -> None:
        self.client("cloudwatch").put_metric_alarm(AlarmName=self.generated_name, **self.properties)

    def delete(self) -> None:
        self.client("cloudwatch").delete_alarms(AlarmNames=[self.physical_id])


class TopicPolicy(Resource):
    TYPE = "AWS::SNS::TopicPolicy"

    def create(self) -> None:
        self._set(json.dumps(self.properties["PolicyDocument"]))

    def delete(self) -> None:
        self._set("{}")

    def _set(self, policy: str) -> None:
        for topic in self.properties["Topics"]:
            self.client("sns").set_topic_attributes(
                TopicArn=topic, AttributeName="Policy", AttributeValue=policy
            )


class Budget(Resource):
    TYPE = "AWS::Budgets::Budget"

    def create(self) -> None:
        budget = self.properties["Budget"]
        limit = {**budget["BudgetLimit"], "Amount": str(budget["BudgetLimit"]["Amount"])}
        self.client("budgets").create_budget(
            AccountId=self.account,
            Budget={**budget, "BudgetLimit": limit},
            NotificationsWithSubscribers=self.properties["NotificationsWithSubscribers"],
            ResourceTags=self.properties["ResourceTags"],
        )
        self.physical_id = budget["BudgetName"]

    def delete(self) -> None:
        self.client("budgets").delete_budget(AccountId=self.account, BudgetName=self.physical_id)


class BuildProject(Resource):
    TYPE = "AWS::CodeBuild::Project"

    def create(self) -> None:
        answer = self.client("codebuild").create_project(name=self.generated_name, **self._parameters())
        self.attributes = {"Arn": answer["project"]["arn"]}

    def delete(self) -> None:
        self.client("codebuild").delete_project(name=self.physical_id)

    def _parameters(self) -> dict[str, Any]:
        parameters: dict[str, Any] = camel(self.properties)
        # the one name that the API spells otherwise
        parameters["source"]["buildspec"] = parameters["source"].pop("buildSpec")
        return parameters


class Parameter(Resource):
    TYPE = "AWS::SSM::Parameter"

    def create(self) -> None:
        self.physical_id = self.properties.get("Name", self.generated_name)
        self.client("ssm").put_parameter(**{**self.properties, "Name": self.physical_id})
        self.attributes = {"Type": self.properties["Type"], "Value": self.properties["Value"]}

    def delete(self) -> None:
        self.client("ssm").delete_parameter(Name=self.physical_id)


class BucketPolicy(Resource):
    TYPE = "AWS::S3::BucketPolicy"

    def create(self) -> None:
        document = self.properties["PolicyDocument"]
        # moto obeys policies but reads no conditions: it would refuse every call
        statements = [each for each in document["Statement"] if each.get("Condition") != _WITHOUT_TLS]
        self.client("s3").put_bucket_policy(
            Bucket=self.properties["Bucket"], Policy=json.dumps({**document, "Statement": statements})
        )

    def delete(self) -> None:
        self.client("s3").delete_bucket_policy(Bucket=self.properties["Bucket"])


class Key(Resource):
    """moto's own fails on tags."""

    TYPE = "AWS::KMS::Key"

    def create(self) -> None:
        kms = self.client("kms")
        made = kms.create_key(
            Policy=json.dumps(self.properties["KeyPolicy"]),
            Description=self.properties["Description"],
            Tags=[{"TagKey": tag["Key"], "TagValue": tag["Value"]} for tag in self.properties["Tags"]],
        )["KeyMetadata"]
        self.physical_id = made["KeyId"]
        self.attributes = {"Arn": made["Arn"], "KeyId": made["KeyId"]}
        if self.properties["EnableKeyRotation"]:
            kms.enable_key_rotation(KeyId=self.physical_id)

    def delete(self) -> None:
        # CloudFormation cannot delete a key at once either
        self.client("kms").schedule_key_deletion(KeyId=self.physical_id)
