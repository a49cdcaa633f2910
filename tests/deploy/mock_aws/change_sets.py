"""Change sets and stacks of CloudFormation: what moto's backend does otherwise, replaced by the engine."""

from __future__ import annotations

import contextlib
from pathlib import Path
from typing import Any

from moto.cloudformation.exceptions import CloudFormationError
from moto.cloudformation.models import CloudFormationBackend

from tests.deploy.mock_aws.engine import RETAINED, RETAINED_BY_ROLLBACK, StackOperation
from tests.deploy.mock_aws.resource import ResourceError


class ChangeSetNotFound(CloudFormationError):  # type: ignore[misc]  # moto has no types
    code = "ChangeSetNotFound"


def install(failures: Path) -> None:
    """Replace moto's change sets and deletion of stacks.

    Args:
        failures: File with one resource type a line, whose creation fails.
    """
    StackOperation.failures = failures
    CloudFormationBackend.execute_change_set = _execute_change_set
    CloudFormationBackend.describe_change_set = _describe_change_set
    CloudFormationBackend.delete_change_set = _delete_change_set
    CloudFormationBackend.delete_stack = _delete_stack


def _execute_change_set(backend: Any, change_set_name: str, stack_name: str | None = None) -> None:
    change_set = backend.describe_change_set(change_set_name)
    stack = backend.stacks[change_set.stack_id]
    stack.resource_map.cross_stack_resources = backend.exports
    _execute(StackOperation(stack), stack, change_set)
    # as AWS does; moto finds sets by their name alone, and every stack's has the same
    backend.change_sets.pop(change_set.change_set_id)
    if "ROLLBACK" not in stack.status:
        stack.template = change_set.template
        stack._parse_template()
        stack.parameters = change_set.parameters
        backend.exports.update({export.name: export for export in stack.exports})


def _describe_change_set(backend: Any, change_set_name: str) -> Any:
    for change_set in backend.change_sets.values():
        if change_set_name in (change_set.change_set_id, change_set.change_set_name):
            return change_set
    raise ChangeSetNotFound(f"ChangeSet [{change_set_name}] does not exist")


def _delete_change_set(backend: Any, change_set_name: str) -> None:
    # one that is not there is no error; moto fails
    with contextlib.suppress(ChangeSetNotFound):
        del backend.change_sets[_describe_change_set(backend, change_set_name).change_set_id]


def _delete_stack(backend: Any, name_or_stack_id: str) -> None:
    stack = backend.get_stack(name_or_stack_id)
    exports = [export.name for export in stack.exports]
    operation = StackOperation(stack)
    operation.event("DELETE_IN_PROGRESS")
    try:
        _refuse_used_exports(backend, stack, exports)
        operation.delete(retained=RETAINED)
    except Exception as error:  # noqa: BLE001
        operation.event("DELETE_FAILED", str(error))
        stack.status = "DELETE_FAILED"
        return
    operation.event("DELETE_COMPLETE")
    stack.status = "DELETE_COMPLETE"
    backend.deleted_stacks[stack.stack_id] = backend.stacks.pop(stack.stack_id)
    for name in exports:
        backend.exports.pop(name)


def _execute(operation: StackOperation, stack: Any, change_set: Any) -> None:
    kind = change_set.change_set_type
    operation.event(f"{kind}_IN_PROGRESS", "User Initiated")
    try:
        operation.apply(change_set.template_dict, change_set.parameters)
    except Exception as error:  # noqa: BLE001
        stack.status = _roll_back(operation, stack, kind=kind, reason=str(error))
    else:
        stack.status = f"{kind}_COMPLETE"
    operation.event(stack.status)


def _roll_back(operation: StackOperation, stack: Any, *, kind: str, reason: str) -> str:
    rollback = "ROLLBACK" if kind == "CREATE" else "UPDATE_ROLLBACK"
    operation.event(f"{rollback}_IN_PROGRESS", reason)
    try:
        if kind == "CREATE":
            operation.delete(retained=RETAINED_BY_ROLLBACK)
        else:
            operation.apply(stack.template_dict, stack.parameters)
    except Exception:  # noqa: BLE001  # the resource's own event says why
        return f"{rollback}_FAILED"
    return f"{rollback}_COMPLETE"


def _refuse_used_exports(backend: Any, stack: Any, exports: list[str]) -> None:
    for other in backend.stacks.values():
        used = [name for name in exports if other is not stack and f'"{name}"' in str(other.template)]
        if used:
            raise ResourceError(f"Export {used[0]} cannot be deleted as it is in use by {other.name}")
