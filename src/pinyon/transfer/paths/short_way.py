"""The way of small requests that have no choice: one path, over an endpoint that lies ready."""

from __future__ import annotations

from typing import Any

from pinyon.transfer.links.endpoint import EndpointKey
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.paths.lane import Lane

__all__ = ["ShortWay"]


class ShortWay:
    """The only path of the best tier between two memory locations. What it carries is too short to be measured."""

    __slots__ = ("elsewhere", "endpoints", "key", "lane", "open", "path")

    def __init__(self, key: EndpointKey, lane: Lane, endpoints: Endpoints[Any] | None, *, elsewhere: bool) -> None:
        self.key = key
        self.path = key[1]
        self.lane = lane
        self.endpoints = endpoints
        """Of a transport whose endpoints move a small request themselves; None: chains go this way, no more."""
        self.elsewhere = elsewhere
        """Another transport serves these locations too."""
        self.open = True
        """Nothing is known to be wrong with it. Once it is shut it stays so."""
