"""CloudFormation as it behaves. moto evaluates templates; order, changes, events and rollback are here.

moto itself creates in the order of the file, retries what fails to go, and knows no rollback: a stack that
AWS could neither make nor delete would pass.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any, ClassVar

from moto.cloudformation import parsing
from moto.cloudformation.models import Event, OutputMap

from tests.deploy.mock_aws.deletions import delete_native
from tests.deploy.mock_aws.resource import Resource, ResourceError

Template = dict[str, Any]

RETAINED = frozenset({"Retain", "RetainExceptOnCreate"})
RETAINED_BY_ROLLBACK = frozenset({"Retain"})


class StackOperation:
    """Brings one stack from what was applied to what a template says, or to nothing."""

    failures: ClassVar[Path]
    """File with one resource type a line, whose creation fails."""

    def __init__(self, stack: Any) -> None:
        self._stack = stack
        self._resources = stack.resource_map
        # logical id -> what it was made from, in the order of creation
        self._applied: dict[str, Any] = stack.__dict__.setdefault("applied", {})

    def apply(self, template: Template, parameters: Mapping[str, str]) -> None:
        """Create and change in the order of dependencies, then delete what is gone.

        Raises:
            Exception: Whatever the first failing resource raised; nothing is rolled back yet.
        """
        self._load(template, parameters)
        wanted = [name for name in in_order(template["Resources"]) if self._is_wanted(name)]
        for name in wanted:
            self._create_or_update(name)
        for name in [name for name in reversed(self._applied) if name not in wanted]:
            self._delete(name, retained=RETAINED)
        self._resources._resource_json_map = {name: template["Resources"][name] for name in wanted}
        self._stack.output_map = OutputMap(self._resources, template, self._stack.stack_id)

    def delete(self, *, retained: frozenset[str]) -> None:
        """Delete everything, last created first, except resources with one of these deletion policies."""
        for name in list(reversed(self._applied)):
            self._delete(name, retained=retained)
        self._resources._resource_json_map = {}
        self._stack.output_map = OutputMap(self._resources, {}, self._stack.stack_id)

    def event(self, status: str, reason: str | None = None, *, name: str = "") -> None:
        """Record what `describe-stack-events` shows."""
        stack, made = self._stack, self._resources._parsed_resources.get(name)
        declared = self._resources._resource_json_map.get(name) or self._applied.get(name, {})
        stack.events.append(
            Event(
                stack_id=stack.stack_id,
                stack_name=stack.name,
                logical_resource_id=name or stack.name,
                physical_resource_id=getattr(made, "physical_resource_id", "") if name else stack.stack_id,
                resource_type=declared["Type"] if name else "AWS::CloudFormation::Stack",
                resource_status=status,
                resource_status_reason=reason,
                resource_properties=None,
            )
        )

    def _load(self, template: Template, parameters: Mapping[str, str]) -> None:
        resources = self._resources
        resources._template = template
        resources._resource_json_map = template["Resources"]
        # for "as before" moto hands over what the parameter's name resolved to, and then looks that up
        resources.input_parameters = {
            name: value
            for name, value in parameters.items()
            if not template["Parameters"][name]["Type"].startswith("AWS::SSM::Parameter::")
        }
        resources.load_mapping()
        resources.load_parameters()
        resources.load_conditions()

    def _is_wanted(self, name: str) -> bool:
        condition = self._resources._resource_json_map[name].get("Condition")
        return not condition or bool(self._resources.lazy_condition_map[condition])

    def _create_or_update(self, name: str) -> None:
        declared = self._resources._resource_json_map[name]
        evaluated = parsing.clean_json(
            {key: declared[key] for key in ("Type", "Properties") if key in declared}, self._resources
        )
        if name not in self._applied:
            verb = "CREATE"
        elif _made_from(self._applied[name]) != evaluated:
            verb = "UPDATE"
        else:
            return
        self.event(f"{verb}_IN_PROGRESS", name=name)
        try:
            self._create(name, declared) if verb == "CREATE" else self._update(name, declared)
        except Exception as error:  # CloudFormation reports, whatever a resource answers
            self.event(f"{verb}_FAILED", str(error), name=name)
            raise
        policy = {key: declared[key] for key in ("DeletionPolicy",) if key in declared}
        self._applied[name] = {**evaluated, **policy}
        self.event(f"{verb}_COMPLETE", name=name)

    def _create(self, name: str, declared: Mapping[str, Any]) -> None:
        if self.failures.exists() and declared["Type"] in self.failures.read_text().splitlines():
            raise ResourceError(f"{declared['Type']}: fails on demand")
        self._resources[name]  # creates what is not there

    def _update(self, name: str, declared: Mapping[str, Any]) -> None:
        made = parsing.parse_and_update_resource(
            name, declared, self._resources, self._stack.account_id, self._stack.region_name
        )
        if made is None:
            raise ResourceError(f"{declared['Type']}: moto cannot update it")
        self._resources._parsed_resources[name] = made

    def _delete(self, name: str, *, retained: frozenset[str]) -> None:
        applied = self._applied[name]
        if applied.get("DeletionPolicy") in retained:
            self.event("DELETE_SKIPPED", name=name)
            del self._applied[name]
            return
        self.event("DELETE_IN_PROGRESS", name=name)
        made = self._resources._parsed_resources[name]
        try:
            if isinstance(made, Resource):
                made.delete()
            else:
                delete_native(made, applied, account=self._stack.account_id, region=self._stack.region_name)
        except Exception as error:
            self.event("DELETE_FAILED", str(error), name=name)
            raise
        self.event("DELETE_COMPLETE", name=name)
        del self._applied[name], self._resources._parsed_resources[name]


def _made_from(applied: Mapping[str, Any]) -> dict[str, Any]:
    return {key: value for key, value in applied.items() if key != "DeletionPolicy"}


def in_order(resources: Mapping[str, Any]) -> list[str]:
    """Return logical ids, each after all that it needs."""
    done: dict[str, None] = {}

    def visit(name: str) -> None:
        if name in done:
            return
        for needed in _needs(resources[name]):
            if needed in resources and needed != name:
                visit(needed)
        done[name] = None

    for name in resources:
        visit(name)
    return list(done)


def _needs(value: Any) -> Iterator[str]:
    if isinstance(value, list):
        for item in value:
            yield from _needs(item)
    elif isinstance(value, Mapping):
        for key, item in value.items():
            if key == "Ref" or (key == "DependsOn" and isinstance(item, str)):
                yield item
            elif key == "Fn::GetAtt":
                yield item[0] if isinstance(item, list) else item.split(".")[0]
            elif key == "DependsOn":
                yield from item
            elif key == "Fn::Sub" and isinstance(item, str):
                yield from re.findall(r"\$\{(\w+)", item)
            else:
                yield from _needs(item)
