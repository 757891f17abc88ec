"""The interface of placement policies: what each must do, and what some can do besides, asked for by ``isinstance``."""

from __future__ import annotations

from random import Random
from typing import Protocol, runtime_checkable

from pinyon.placement.policy import Move, PlacementDecision, PlacementRequest, Pool, Waiting
from pinyon.placement.prefix_match import PrefixMatch


class PlacementPolicy(Protocol):
    """The choice of a pair of instances. ``now_s`` is the time, by the clock that measurements were taken by; chance
    comes from ``rng`` alone. A policy may remember what it was asked: the same questions in the same order have the
    same answers.

    It is only called with at least one prefill and one decode instance. Whether the decision meets the SLO is judged
    afterwards (:mod:`pinyon.placement.admission`)."""

    @property
    def name(self) -> str:
        """The name in settings and placements."""

    def place(
        self, request: PlacementRequest, pool: Pool, match: PrefixMatch, now_s: float, rng: Random
    ) -> PlacementDecision: ...


@runtime_checkable
class Rebalancing(Protocol):
    """A policy that moves waiting requests. It is asked after each placement."""

    def moves(self, request: PlacementRequest, decision: PlacementDecision, waiting: Waiting) -> list[Move]:
        """Returns what should move, now that ``request`` was placed so."""


@runtime_checkable
class LearningPlacement(Protocol):
    """A policy that learns what came of its decisions."""

    def prefilled(self, decision: PlacementDecision, seconds: float) -> None:
        """Learns that a prompt was computed ``seconds`` after it was placed so; called for decisions with a trial."""
