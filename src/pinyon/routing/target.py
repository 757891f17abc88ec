"""The state that a load balancer keeps of one target: an instance of its region, or another region."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

UNKNOWN: Final = -1


@dataclass(slots=True)  # a frozen dataclass takes five times as long to create
class Report:
    """The load of a target in requests, reported or probed; :data:`UNKNOWN` where it did not say. Never changed.

    For an instance, ``pending`` counts accepted requests for which its batch has no room, without those in prefill
    (SkyWalker §3.3). For a region, ``pending`` is its load balancer's queue, and ``room`` is what that one grants us.
    """

    pending: int = UNKNOWN
    running: int = UNKNOWN
    room: int = UNKNOWN
    """Further requests that the target could take without letting them wait."""
    received: int = UNKNOWN
    """Our requests received since the target began to count; those still under way are in no other number."""
    available: int = UNKNOWN
    """Instances with room, for a region only."""
    instances: int = UNKNOWN
    """Instances that share the load, for a region only."""


class Target:
    """A place that requests are pushed to. Only its :class:`pinyon.routing.layer.Layer` changes it."""

    __slots__ = (
        "batches",
        "capacity",
        "distance_s",
        "draining",
        "ended",
        "live",
        "name",
        "outstanding",
        "region",
        "report",
        "reported_s",
        "sent",
        "sent_before",
    )

    def __init__(self, name: str, capacity: int = 0, distance_s: float = 0.0, region: str = "") -> None:
        self.name = name
        self.region = region
        """The region of the target if it is another one. A region may have several load balancers."""
        self.capacity = capacity
        """Requests in its batch, or instances of a region, to which the load is compared. 0: the target did not say."""
        self.distance_s = distance_s
        """Measured round-trip time in seconds; 0 within the region."""
        self.batches = True
        """True if the target generates and so has a batch; an instance that only computes prompts has none."""
        self.live = True
        self.draining = False
        """True while the target takes nothing new."""
        self.outstanding = 0
        """Our requests that were sent to the target and have not ended."""
        self.sent = 0
        """All our requests that were sent to the target and that it counts."""
        self.sent_before = 0
        """The value of ``sent`` when the last report was made, as far as we know."""
        self.ended = 0
        """Our requests that ended since the last report."""
        self.report = Report()
        self.reported_s = -math.inf

    @property
    def unseen(self) -> int:
        """Our requests that the last report does not contain, at most those outstanding."""
        return min(self.outstanding, self.sent - self.sent_before)

    @property
    def load(self) -> int:
        """All requests at the target as far as we know, ours and others'."""
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
