"""The part of the EKS API that moto lacks: add-ons and access entries."""

from __future__ import annotations

from collections import defaultdict
from typing import Any

from moto.core.responses import ActionResult, EmptyResult
from moto.eks import urls
from moto.eks.exceptions import InvalidParameterException, ResourceInUseException, ResourceNotFoundException
from moto.eks.responses import EKSResponse

_addons: dict[str, dict[str, Any]] = defaultdict(dict)
_entries: dict[str, dict[str, Any]] = defaultdict(dict)
_policies: dict[tuple[str, str], list[dict[str, Any]]] = defaultdict(list)


class EksApi(EKSResponse):  # type: ignore[misc]
    """Operations of add-ons and access entries."""

    def create_addon(self) -> ActionResult:
        addons, name = _addons[self._cluster()], self._get_param("addonName")
        if name in addons:
            raise ResourceInUseException(message=f"Addon already exists: {name}")
        addons[name] = {
            "addonName": name,
            "clusterName": self._cluster(),
            "status": "ACTIVE",
            "addonArn": f"arn:aws:eks:{self.region}:{self.current_account}:addon/{self._cluster()}/{name}/1",
            "addonVersion": self._get_param("addonVersion") or "v1.0.0-eksbuild.1",
            "configurationValues": self._get_param("configurationValues") or "",
            "podIdentityAssociations": [
                f"{each['serviceAccount']}={each['roleArn']}"
                for each in self._get_param("podIdentityAssociations") or []
            ],
        }
        return ActionResult({"addon": addons[name]})

    def describe_addon(self) -> ActionResult:
        return ActionResult({"addon": self._found(_addons, "addonName")})

    def list_addons(self) -> ActionResult:
        return ActionResult({"addons": list(_addons[self._cluster()])})

    def delete_addon(self) -> ActionResult:
        self._found(_addons, "addonName")
        return ActionResult({"addon": _addons[self._cluster()].pop(self._get_param("addonName"))})

    def create_access_entry(self) -> ActionResult:
        entries, principal = _entries[self._cluster()], self._get_param("principalArn")
        if principal in entries:
            raise ResourceInUseException(message=f"The specified access entry exists already: {principal}")
        entries[principal] = {
            "clusterName": self._cluster(),
            "principalArn": principal,
            "type": self._get_param("type") or "STANDARD",
        }
        return ActionResult({"accessEntry": entries[principal]})

    def describe_access_entry(self) -> ActionResult:
        return ActionResult({"accessEntry": self._found(_entries, "principalArn")})

    def list_access_entries(self) -> ActionResult:
        return ActionResult({"accessEntries": list(_entries[self._cluster()])})

    def delete_access_entry(self) -> EmptyResult:
        self._found(_entries, "principalArn")
        principal = self._get_param("principalArn")
        del _entries[self._cluster()][principal]
        _policies.pop((self._cluster(), principal), None)
        return EmptyResult()

    def associate_access_policy(self) -> ActionResult:
        entry = self._found(_entries, "principalArn")
        if entry["type"] != "STANDARD":
            raise InvalidParameterException(message=f"An entry of type {entry['type']} carries no policy")
        policy = {"policyArn": self._get_param("policyArn"), "accessScope": self._get_param("accessScope")}
        _policies[self._cluster(), entry["principalArn"]].append(policy)
        return ActionResult({"associatedAccessPolicy": policy})

    def list_associated_access_policies(self) -> ActionResult:
        key = self._cluster(), self._get_param("principalArn")
        return ActionResult({"associatedAccessPolicies": _policies[key]})

    def _cluster(self) -> str:
        name: str = self._get_param("name")
        self.eks_backend.describe_cluster(name)
        return name

    def _found(self, objects: dict[str, dict[str, Any]], parameter: str) -> dict[str, Any]:
        name = self._get_param(parameter)
        if name not in objects[self._cluster()]:
            raise ResourceNotFoundException(message=f"{parameter}: {name} not found")
        found: dict[str, Any] = objects[self._cluster()][name]
        return found


def install() -> None:
    """Let moto's server answer these operations."""
    cluster = "{0}/clusters/(?P<name>[^/]+)"
    one_addon, one_entry = "addons/(?P<addonName>[^/]+)", "access-entries/(?P<principalArn>.+)"
    for path in ("addons", one_addon, "access-entries", one_entry):
        urls.url_paths[f"{cluster}/{path}$"] = EksApi.dispatch
