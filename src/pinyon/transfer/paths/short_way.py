"""The way of requests that have no choice: one path, over an endpoint that lies ready."""

from __future__ import annotations

from typing import Any

from pinyon.transfer.links.endpoint import EndpointKey
from pinyon.transfer.links.endpoints import Endpoints
from pinyon.transfer.paths.lane import Lane

__all__ = ["ShortWay"]


class ShortWay:
    """The only path of the best tier between two memory locations. Its rate decides nothing, and is not measured."""

    __slots__ = ("elsewhere", "endpoints", "key", "lane", "most_bytes", "open", "path")

    def __init__(self, key: EndpointKey, lane: Lane, endpoints: Endpoints[Any] | None, *, elsewhere: bool) -> None:
        self.key = key
        self.path = key[1]
        self.lane = lane
        self.endpoints = endpoints
        """Of a transport whose endpoints move a request themselves; None: chains go this way, no more."""
        self.most_bytes = endpoints.moves_bytes if endpoints is not None else 0
        """Of such a request."""
        self.elsewhere = elsewhere
        """Another transport serves these locations too."""
        self.open = True
        """Nothing is known to be wrong with it. Once it is shut it stays so."""
