"""Calls of the doctor that moto lacks, added to moto's own services.

Requests are built and answers are read in the wire format of the service, as for all other calls.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import pytest
from moto.core.exceptions import JsonRESTError
from moto.core.responses import ActionResult
from moto.ec2.exceptions import EC2ClientError
from moto.ec2.responses import EC2Response
from moto.eks import urls as eks_urls
from moto.eks.responses import EKSResponse
from moto.servicequotas.responses import ServiceQuotasResponse

eks_urls.url_paths["{0}/cluster-versions$"] = eks_urls.response.dispatch


class AwsCalls:
    """Says what they answer, until the test ends."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self._monkeypatch = monkeypatch

    def reservations(self, *known: Mapping[str, Any]) -> None:
        """Let EC2 know these capacity reservations and no other."""

        def describe(request: Any) -> ActionResult:
            wanted = request._get_param("CapacityReservationIds")
            found = [each for each in known if each["CapacityReservationId"] in wanted]
            if len(found) < len(wanted):
                raise EC2ClientError("InvalidCapacityReservationId.NotFound", f"{wanted} not found")
            return ActionResult({"CapacityReservations": found})

        self._set(EC2Response, "describe_capacity_reservations", describe)

    def cluster_versions(self, status_of: Mapping[str, str]) -> None:
        """Let EKS know these Kubernetes versions."""
        versions = [{"clusterVersion": v, "versionStatus": status} for v, status in status_of.items()]
        result = ActionResult({"clusterVersions": versions})
        self._set(EKSResponse, "describe_cluster_versions", lambda _: result)

    def quotas(self, value: float) -> None:
        """Give every quota one value; moto has quotas of VPC only."""
        result = ActionResult({"Quota": {"Value": value}})
        self._set(ServiceQuotasResponse, "get_service_quota", lambda _: result)

    def no_quotas(self, code: str, message: str) -> None:
        """Refuse to tell quotas."""

        def refuse(_: Any) -> ActionResult:
            raise JsonRESTError(code, message)

        self._set(ServiceQuotasResponse, "get_service_quota", refuse)

    def _set(self, service: type, operation: str, method: Any) -> None:
        self._monkeypatch.setattr(service, operation, method, raising=False)
