"""The state that a load balancer keeps of one target: an instance of its region, or another region.

Also here: the parts of a request that determine the choice among targets, and the choices by load alone."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, field
from typing import Final, NamedTuple

from pinyon.routing.routing_keys import KEY_BYTES

UNKNOWN: Final = -1
NEAR: Final = 1.1
"""Targets up to this many times as full as the least full one count as equally good if they are nearer."""


class Routed(NamedTuple):
    """The parts of a request that determine its route."""

    keys: bytes = b""
    """Packed routing keys of the prompt."""
    hash_key: str = ""
    """The session, user or tenant of the request, named the same in every region."""

    @property
    def chunks(self) -> int:
        return len(self.keys) // KEY_BYTES


@dataclass(slots=True)  # a frozen dataclass takes five times as long to create
class Report:
    """The load of a target in requests, reported or probed; :data:`UNKNOWN` for what it did not say. Never changed.

    For an instance, ``pending`` counts accepted requests for which its batch has no room, without those in prefill
    (SkyWalker §3.3). For a region, ``pending`` is its load balancer's queue, and ``room`` is what it grants us."""

    pending: int = UNKNOWN
    running: int = UNKNOWN
    room: int = UNKNOWN
    """Further requests that the target could take without making them wait."""
    received: int = UNKNOWN
    """Our requests that the target has received since it began to count; no other number contains those under way."""
    available: int = UNKNOWN
    """Instances with room, for a region only."""
    instances: int = UNKNOWN
    """Instances that share the load, for a region only."""


@dataclass(slots=True, eq=False)
class Target:
    """A place that requests are pushed to. Only its :class:`pinyon.routing.layer.Layer` changes the counts."""

    name: str
    capacity: int = 0
    """The batch size of an instance, or the number of a region's instances; 0: the target did not say."""
    distance_s: float = 0.0
    """Measured round-trip time in seconds; 0 within the region."""
    region: str = ""
    """The region of the target if it is another one. A region may have several load balancers."""
    batches: bool = True
    """True if the target generates and so has a batch; an instance that only computes prompts has no batch."""
    live: bool = True
    """True while the target answers. Its cache may survive a time without answers."""
    draining: bool = False
    """True while the target takes nothing new."""
    outstanding: int = 0
    """Our requests that were sent to the target and have not ended."""
    sent: int = 0
    """All our requests that were sent to the target and that it counts."""
    sent_before: int = 0
    """The value of ``sent`` when the last report was made, as far as known."""
    ended: int = 0
    """Our requests that ended since the last report."""
    report: Report = field(default_factory=Report)
    reported_s: float = -math.inf

    @property
    def unseen(self) -> int:
        """Our requests that the last report does not contain; at most those outstanding."""
        return min(self.outstanding, self.sent - self.sent_before)

    @property
    def load(self) -> int:
        """All requests at the target, ours and others', as far as known."""
        report, outstanding = self.report, self.outstanding
        if report.running == UNKNOWN:
            return outstanding
        unseen = self.sent - self.sent_before
        told = report.running - self.ended + (unseen if unseen < outstanding else outstanding)
        if report.pending > 0:
            told += report.pending
        return told if told > outstanding else outstanding

    @property
    def fullness(self) -> float:
        """The load relative to the capacity; the load itself where the capacity is unknown."""
        return self.load / self.capacity if self.capacity else float(self.load)


def least_full(targets: Sequence[Target]) -> Target:
    """Returns the least full target; among equals the nearest, then the one with the smaller name."""
    best = targets[0]
    best_rank = (best.fullness, best.distance_s, best.name)
    for target in targets[1:]:
        rank = (target.fullness, target.distance_s, target.name)
        if rank < best_rank:
            best, best_rank = target, rank
    return best


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
