"""The stacks as CloudFormation shows them."""

from __future__ import annotations

from typing import Any, NamedTuple

from tests.deploy.account import Account

NAMES = ("holdfast-network", "holdfast-storage", "holdfast-cluster")


class Change(NamedTuple):
    """What happened to one resource."""

    stack: str
    resource_type: str
    status: str


class StackChanges:
    """What CloudFormation does to the resources of all stacks from now on."""

    def __init__(self, account: Account) -> None:
        self._account = account
        self._seen = {event["EventId"] for event in self._events()}

    def since_then(self) -> list[Change]:
        """Return one change for each resource that was created, updated or deleted, or failed to be."""
        return [
            Change(event["StackName"], event["ResourceType"], event["ResourceStatus"])
            for event in self._events()
            if event["EventId"] not in self._seen
            and event["ResourceType"] != "AWS::CloudFormation::Stack"
            and not event["ResourceStatus"].endswith("IN_PROGRESS")
        ]

    def _events(self) -> list[dict[str, Any]]:
        client = self._account.client("cloudformation")
        return [
            event for name in NAMES for event in client.describe_stack_events(StackName=name)["StackEvents"]
        ]


def statuses(account: Account) -> dict[str, str]:
    """Return {name of a stack that stands: its status}."""
    found = account.client("cloudformation").describe_stacks()["Stacks"]
    return {stack["StackName"]: stack["StackStatus"] for stack in found}


def resource_id(account: Account, stack: str, resource_type: str) -> str:
    """Return the physical id of the one resource of this type."""
    listed = account.client("cloudformation").list_stack_resources(StackName=stack)
    (found,) = [each for each in listed["StackResourceSummaries"] if each["ResourceType"] == resource_type]
    return str(found["PhysicalResourceId"])
