"""What decides where requests go, as settings have it."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.routing.geography import ANYWHERE, Geography
from pinyon.routing.pushing import Blind

__all__ = ["RoutingOptions"]


@dataclass(frozen=True, slots=True)
class RoutingOptions:
    """How this load balancer decides where requests go."""

    region: str = ""
    """What this one is called."""
    geography: Geography = ANYWHERE
    pushing: str = Blind.name
    """A choice of the registry, as is ``routing``."""
    routing: str = "skywalker"
