"""What a load balancer knows of one place that it may push requests to: an instance of its region, or another
region."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Final

UNKNOWN: Final = -1


@dataclass(slots=True)  # what is frozen takes five times as long to make
class Report:
    """What a target says of itself, or a probe found out; all in requests, :data:`UNKNOWN` where it did not say. Nobody
    changes one.

    Of an instance, ``pending`` are those it has accepted and has no room in its batch for: not those whose prompt it
    computes (SkyWalker §3.3). Of a region, ``pending`` is the queue of its load balancer and ``room`` what that grants
    us.
    """

    pending: int = UNKNOWN
    running: int = UNKNOWN
    room: int = UNKNOWN
    """Further ones that it would not have to let wait."""
    received: int = UNKNOWN
    """Of ours, in all, since it began to count; those that are under way are not in the other numbers."""
    available: int = UNKNOWN
    """Of a region: instances with room."""
    instances: int = UNKNOWN
    """Of a region: what its load is for."""


class Target:
    """Changed by its :class:`pinyon.routing.layer.Layer` alone."""

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
        """Where it is, if that is another one: regions may have several load balancers."""
        self.capacity = capacity
        """Requests its batch holds, or instances of a region: loads are compared for that. 0: it did not say."""
        self.distance_s = distance_s
        """There and back, as measured; 0 for who is here."""
        self.batches = True
        """It generates: there may be room in its batch, or not. One that only computes prompts has none."""
        self.live = True
        self.draining = False
        """It takes nothing new."""
        self.outstanding = 0
        """Of ours, sent and not ended."""
        self.sent = 0
        """Of ours, in all."""
        self.sent_before = 0
        """Of these, when the last report was made as far as we know."""
        self.ended = 0
        """Of ours, since the last report."""
        self.report = Report()
        self.reported_s = -math.inf

    @property
    def unseen(self) -> int:
        """Of ours, sent and not in the last report. A target cannot know of more than are outstanding."""
        return min(self.outstanding, self.sent - self.sent_before)

    @property
    def load(self) -> int:
        """Requests it has as far as we know, ours and others'."""
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
        """Its load for its size; of those that say no size, the load."""
        return self.load / self.capacity if self.capacity else float(self.load)
