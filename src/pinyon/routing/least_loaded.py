"""The least busy target: the baseline LL of SkyWalker §5.1."""

from __future__ import annotations

from collections.abc import Sequence
from typing import ClassVar

from pinyon.routing.target import Target
from pinyon.routing.target_policy import Routed, least_full


class LeastLoaded:
    """By the requests that it has for its size."""

    name: ClassVar[str] = "least_loaded"

    def add(self, name: str) -> None:
        pass

    def remove(self, name: str) -> None:
        pass

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        return least_full(available)

    def waits_for(self, request: Routed, available: Sequence[Target], full: Sequence[Target]) -> Target | None:
        return None

    def affinity(self, request: Routed, name: str) -> int:
        return 0

    def sent(self, request: Routed, name: str) -> None:
        pass
