"""Regions that say they have room, and refuse what they are sent: the pause before they are believed again.

A region's state comes every 100 ms, and may say "room" each time while its load balancer takes nothing, for a reason
that its state does not tell. What waits at the front of the queue would go there and come back ten times a second for
as long as that lasts.
"""

from __future__ import annotations

from dataclasses import replace
from typing import Final

from pinyon.core.avoidance import Avoidance
from pinyon.routing.target import Report

__all__ = ["FIRST_S", "MAX_S", "Refusals"]

FIRST_S: Final = 0.1
"""As long as until its next word anyway."""
MAX_S: Final = 3.2


class Refusals:
    """By load balancer. A pause doubles with each refusal in a row, :data:`FIRST_S` to :data:`MAX_S`, and is forgotten
    when a request is accepted that was sent after it. The caller passes clock values (seconds)."""

    def __init__(self, peers_max: int = 1024) -> None:
        self._pauses = Avoidance(first_s=FIRST_S, max_s=MAX_S, max_peers=peers_max)

    def refused(self, name: str, now_s: float) -> None:
        """It had no room for a request. Those that went there together are refused together: that counts once."""
        self._pauses.failed(name, now_s)

    def accepted(self, name: str, sent_s: float) -> None:
        """It serves a request that was sent then."""
        self._pauses.succeeded(name, sent_s)

    def gone(self, name: str) -> None:
        """Nothing is known of it any more."""
        self._pauses.succeeded(name)

    def believed(self, name: str, report: Report, now_s: float) -> Report:
        """What its word is worth now: during a pause it has no instance with room."""
        return replace(report, available=0) if self._pauses.avoids(name, now_s) else report
