"""What decides in the routing room: which target a request gets, and when it may be pushed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pinyon.routing.target import Target
from pinyon.routing.target_policy import Routed


class TargetPolicy(Protocol):
    """Knows the targets of one layer: instances of the region, or other regions. Owned by one thread."""

    @property
    def name(self) -> str: ...

    def add(self, name: str) -> None:
        """A target comes, or comes back with nothing in its cache. The caller has removed it before then."""

    def remove(self, name: str) -> None:
        """A target has gone, or lost what it held."""

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        """One of those, which are not none. Changes nothing that :meth:`sent` could not."""

    def waits_for(self, request: Routed, available: Sequence[Target], full: Sequence[Target]) -> Target | None:
        """One of the ``full``, where it is better off waiting for what that one alone holds than where there is room,
        if there is any. Changes nothing."""

    def affinity(self, request: Routed, name: str) -> int:
        """How much speaks for that target where those of several layers can be chosen; 0: nothing but its load."""

    def sent(self, request: Routed, name: str) -> None:
        """The request went there, whoever chose so."""


class PushingRule(Protocol):
    """Owned by one thread, and without state of its own."""

    @property
    def name(self) -> str: ...

    def spare(self, target: Target, now_s: float) -> int:
        """Requests that may be pushed there now; 0: it is not available."""

    def admits(self, target: Target, now_s: float) -> bool:
        """It is not available, and yet one that finds its prompt there may be pushed, and wait at its door."""
