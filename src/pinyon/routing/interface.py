"""The interfaces of the routing room: which target gets a request, and when it may be pushed there."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Protocol

from pinyon.routing.target import Routed, Target


class TargetPolicy(Protocol):
    """A policy over the targets of one layer: instances of the region, or other regions. Owned by one thread."""

    @property
    def name(self) -> str: ...

    def add(self, name: str) -> None:
        """Adds a target with an empty cache. The caller has removed any earlier target of that name."""

    def remove(self, name: str) -> None:
        """Removes a target that has gone, or that lost its cache."""

    def choose(self, request: Routed, available: Sequence[Target]) -> Target:
        """Returns one target of ``available``, which is not empty. Changes only what :meth:`sent` may change."""

    def waits_for(self, request: Routed, available: Sequence[Target], full: Sequence[Target]) -> Target | None:
        """Returns the ``full`` target worth waiting for, or None. ``available`` may be empty. Changes nothing."""

    def affinity(self, request: Routed, name: str) -> int:
        """Returns how much speaks for the target, when several layers offer one; 0: nothing but its load."""

    def sent(self, request: Routed, name: str) -> None:
        """Records that the request was sent to the target, whoever chose it."""


class PushingRule(Protocol):
    """A rule for when a target may get more requests. Owned by one thread, and without state of its own."""

    @property
    def name(self) -> str: ...

    def spare(self, target: Target, now_s: float) -> int:
        """Returns how many requests may be pushed to the target now; 0 means that it is not available."""

    def admits(self, target: Target, now_s: float) -> bool:
        """Returns whether an unavailable target may still get a request whose prompt it holds, to wait there."""
