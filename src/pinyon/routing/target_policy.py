"""Which of the available targets gets a request: the seam between the two layers of routing and the policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

from pinyon.routing.routing_keys import KEY_BYTES
from pinyon.routing.target import Target


class Routed(NamedTuple):
    """What of a request its way depends on."""

    keys: bytes = b""
    """Routing keys of its prompt, packed."""
    hash_key: str = ""
    """Whose it is: session, user or tenant, the same in every region."""

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES


def least_full(targets: Sequence[Target]) -> Target:
    """The one that is least full; of those, the nearest, then the smaller name."""
    best = targets[0]
    best_rank = (best.fullness, best.distance_s, best.name)
    for target in targets[1:]:
        rank = (target.fullness, target.distance_s, target.name)
        if rank < best_rank:
            best, best_rank = target, rank
    return best


NEAR = 1.1
"""So many times as full as the least full one is as good, if it is nearer."""


def near_least_full(targets: Sequence[Target]) -> Target:
    """The nearest, by measured round trips, of those that are hardly fuller than the least full one; of several that
    are equally near, the least full."""
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
