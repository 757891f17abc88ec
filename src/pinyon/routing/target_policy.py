"""Which of the available targets gets a request: the seam between the two layers of routing and the policies."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple, Protocol

from mypy_extensions import mypyc_attr

from pinyon.routing.routing_keys import KEY_BYTES
from pinyon.routing.target import Target

__all__ = ["Routed", "TargetPolicy", "least_full", "near_least_full"]


class Routed(NamedTuple):
    """What of a request its way depends on."""

    keys: bytes = b""
    """Routing keys of its prompt, packed."""
    hash_key: str = ""
    """Whose it is: session, user or tenant, the same in every region."""

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES


@mypyc_attr(allow_interpreted_subclasses=True)
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
        ...

    def waits_for(self, request: Routed, available: Sequence[Target], full: Sequence[Target]) -> Target | None:
        """One of the ``full``, where it is better off waiting for what that one alone holds than where there is room,
        if there is any. Changes nothing."""
        ...

    def affinity(self, request: Routed, name: str) -> int:
        """How much speaks for that target where those of several layers can be chosen; 0: nothing but its load."""
        ...

    def sent(self, request: Routed, name: str) -> None:
        """The request went there, whoever chose so."""


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
