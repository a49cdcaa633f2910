"""What a stack becomes, as plain dictionaries."""

from __future__ import annotations

from typing import Any

import aws_cdk as cdk
from aws_cdk import assertions


class Synthesised:
    """The template of one stack."""

    def __init__(self, template: dict[str, Any]) -> None:
        self.template = template

    @classmethod
    def of(cls, stack: cdk.Stack) -> Synthesised:
        return cls(dict(assertions.Template.from_stack(stack).to_json()))

    @property
    def resources(self) -> dict[str, Any]:
        resources: dict[str, Any] = self.template["Resources"]
        return resources

    def all(self, kind: str) -> list[dict[str, Any]]:
        """Return the properties of every resource of a type."""
        return [r.get("Properties", {}) for r in self.resources.values() if r["Type"] == kind]

    def one(self, kind: str) -> dict[str, Any]:
        """Return the properties of the only resource of a type."""
        found = self.all(kind)
        assert len(found) == 1, f"{len(found)} resources of type {kind}"
        return found[0]

    def only(self, kind: str) -> tuple[str, dict[str, Any]]:
        """Return logical id and whole resource of the only one of a type."""
        found = [(name, r) for name, r in self.resources.items() if r["Type"] == kind]
        assert len(found) == 1, f"{len(found)} resources of type {kind}"
        return found[0]

    def waits_for(self, kind: str) -> set[str]:
        """Return the types that the resources of `kind` wait for by DependsOn."""
        names = {n for r in self.resources.values() if r["Type"] == kind for n in r.get("DependsOn", [])}
        return {self.resources[name]["Type"] for name in names}

    def actions(self) -> set[str]:
        """Return every action that an inline policy allows."""
        statements = [
            statement
            for policy in self.all("AWS::IAM::Policy")
            for statement in policy["PolicyDocument"]["Statement"]
        ]
        listed = [s["Action"] if isinstance(s["Action"], list) else [s["Action"]] for s in statements]
        return {action for actions in listed for action in actions}
