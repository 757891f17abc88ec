"""What some placement policies can do besides placing: asked of a policy by ``isinstance``."""

from __future__ import annotations

from collections.abc import Callable
from typing import Protocol, runtime_checkable

from pinyon.placement.policy import Move, PlacementDecision, PlacementRequest, Pool, Queues
from pinyon.placement.prefix_match import PrefixMatch

__all__ = ["Learning", "Rebalancing"]


@runtime_checkable
class Rebalancing(Protocol):
    """Moves what waits. Asked after each placement."""

    def moves(
        self,
        request: PlacementRequest,
        decision: PlacementDecision,
        pool: Pool,
        queues: Queues,
        match: Callable[[PlacementRequest], PrefixMatch],
        now_s: float,
    ) -> list[Move]:
        """What should move, now that ``request`` was placed so. ``match`` looks up who holds a prompt."""


@runtime_checkable
class Learning(Protocol):
    """Learns what came of its decisions."""

    def prefilled(self, decision: PlacementDecision, seconds: float) -> None:
        """The prompt was computed, so many seconds after it was placed so; told of decisions with a trial."""
