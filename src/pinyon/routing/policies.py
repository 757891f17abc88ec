"""The routing policies by name."""

from __future__ import annotations

from pinyon.core.policies import NoSettings, Registry
from pinyon.routing.least_loaded import LeastLoaded
from pinyon.routing.policy import RoutingPolicy
from pinyon.routing.round_robin import RoundRobin

__all__ = ["ROUTING_POLICIES"]

ROUTING_POLICIES: Registry[RoutingPolicy] = Registry(
    "routing",
    {
        LeastLoaded.name: (NoSettings, lambda _: LeastLoaded()),
        RoundRobin.name: (NoSettings, lambda _: RoundRobin()),
    },
)
