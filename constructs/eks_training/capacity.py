"""How EC2 provides the GPU instances: on demand, from a reservation, or from a capacity block."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from aws_cdk import aws_ec2 as ec2

LaunchTemplate = ec2.CfnLaunchTemplate


@dataclass(frozen=True, kw_only=True, slots=True)
class Capacity:
    """One capacity mode and what belongs to it."""

    mode: Literal["on-demand", "reservation", "capacity-block"] = "on-demand"
    reservation_id: str = ""
    placement_group: str = ""
    """The placement group that a reservation was made in."""
    start: str = ""
    """When nodes are launched, ISO 8601 UTC; empty for at once."""
    drain_at: str = ""
    """When the group is scaled to zero, ISO 8601 UTC; empty for never."""

    @property
    def wants_own_placement_group(self) -> bool:
        """Say whether the nodes get a cluster placement group of their own.

        EC2 does not give reserved instances to a placement group that the reservation was not made in
        (eksctl-io/eksctl#8220 got 11 of 16).
        """
        return self.mode == "on-demand"

    @property
    def market_options(self) -> LaunchTemplate.InstanceMarketOptionsProperty | None:
        """Return the purchase option of the launch template."""
        if self.mode != "capacity-block":
            return None
        return LaunchTemplate.InstanceMarketOptionsProperty(market_type="capacity-block")

    @property
    def reservation(self) -> LaunchTemplate.CapacityReservationSpecificationProperty | None:
        """Return the reservation that the launch template targets."""
        if not self.reservation_id:
            return None
        target = LaunchTemplate.CapacityReservationTargetProperty(capacity_reservation_id=self.reservation_id)
        return LaunchTemplate.CapacityReservationSpecificationProperty(capacity_reservation_target=target)
