"""The way of small requests that have no choice: one path, over an endpoint that lies ready."""

from __future__ import annotations

from typing import Any

from pinyon.transfer.links.endpoint import EndpointKey
from pinyon.transfer.links.endpoints import Endpoints


class ShortWay:
    """The only path of the best tier between two memory locations, of a transport whose endpoints move a request
    themselves. Its rate decides nothing, and is not measured."""

    __slots__ = ("endpoints", "key", "open", "path")

    def __init__(self, key: EndpointKey, endpoints: Endpoints[Any]) -> None:
        self.key = key
        self.path = key[1]
        self.endpoints = endpoints
        self.open = True
        """Nothing is known to be wrong with it. Once it is shut it stays so."""
