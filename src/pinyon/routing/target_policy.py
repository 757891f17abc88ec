"""The seam between the two layers of routing and the policies that choose among available targets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pinyon.routing.routing_keys import KEY_BYTES
from pinyon.routing.target import Target


class Routed(NamedTuple):
    """The parts of a request that its route depends on."""

    keys: bytes = b""
    """Packed routing keys of the prompt."""
    hash_key: str = ""
    """The session, user or tenant of the request, named the same in every region."""

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES


def least_full(targets: Sequence[Target]) -> Target:
    """Returns the least full target; among equals the nearest, then the one with the smaller name."""
    best = targets[0]
    best_rank = (best.fullness, best.distance_s, best.name)
    for target in targets[1:]:
        rank = (target.fullness, target.distance_s, target.name)
        if rank < best_rank:
            best, best_rank = target, rank
    return best


NEAR = 1.1
"""Targets up to this many times as full as the least full target are as good if they are nearer."""


def near_least_full(targets: Sequence[Target]) -> Target:
    """Returns the nearest target within :data:`NEAR` of the least full; among equally near ones, the least full."""
    best = targets[0]
    if len(targets) == 1:
        return best
    fullness = [target.fullness for target in targets]
    limit = NEAR * min(fullness)
    best_rank: tuple[float, float, str] | None = None
    for target, full in zip(targets, fullness, strict=True):
        if full <= limit:
            rank = (target.distance_s, full, target.name)
            if best_rank is None or rank < best_rank:
                best, best_rank = target, rank
    return best
