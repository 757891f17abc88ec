"""The short way of small requests that have no choice: one path, over an endpoint that lies ready."""

from __future__ import annotations

from typing import Any

from pinyon.transfer.links.endpoint import EndpointKey
from pinyon.transfer.links.endpoints import Endpoints


class ShortWay:
    """A path that is alone in the best tier between two memory locations, and whose endpoints move requests themselves.

    Its rate decides nothing, and is not measured.
    """

    __slots__ = ("endpoints", "key", "open", "path")

    def __init__(self, key: EndpointKey, endpoints: Endpoints[Any]) -> None:
        self.key = key
        self.path = key[1]
        self.endpoints = endpoints
        self.open = True
        """True while nothing is known to be wrong with it. Once it is shut it stays so."""
