"""What decides where requests go, as settings have it."""

from __future__ import annotations

from dataclasses import dataclass

from pinyon.routing.geography import ANYWHERE, Geography
from pinyon.routing.pushing import Blind

__all__ = ["WaysOptions"]


@dataclass(frozen=True, slots=True)
class WaysOptions:
    """``region``: what this one is called; ``secret``: the federation's, which routing keys start from; ``pushing`` and
    ``routing``: choices of the registries."""

    region: str = ""
    secret: bytes = b""
    geography: Geography = ANYWHERE
    pushing: str = Blind.name
    routing: str = "skywalker"
