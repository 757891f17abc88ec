"""Which instances a load balancer knows: those listed now, and those that it knows from before.

A conductor that has just started knows nobody until they have registered with it, and says so by an empty or short
list. That is no news of the others. So whoever was known before a conductor began to speak stays until it has listed
them (from then on its word counts), says that its list is whole, or a grace time is over. And when most of those known
are missing at once in what it takes for a whole list, then it is the conductor that lost them, not they that all died:
they stay for the grace time, too.
"""

from __future__ import annotations

from collections.abc import Iterable

LOST_TOGETHER_MIN = 2
"""One alone may go at any time, but for when its conductor has just started."""


class Roster:
    """Of one load balancer. While no conductor speaks, all stay as they are."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._listed: frozenset[str] = frozenset()
        self._unconfirmed: frozenset[str] = frozenset()
        self._until_s: float | None = None
        self._short = False
        """The last list was not whole, and the conductor knew it."""

    @property
    def unconfirmed(self) -> frozenset[str]:
        """Those that are known from before, and not listed."""
        return self._unconfirmed

    def listed(self, ids: Iterable[str], now_s: float, *, first: bool = False, incomplete: bool = False) -> None:
        """A conductor's list: its ``first`` one if it has just begun to speak, ``incomplete`` if it says so."""
        known, kept = self._listed | self._unconfirmed, self._unconfirmed
        self._listed = frozenset(ids)
        missing = known - self._listed
        was_short, self._short = self._short, incomplete
        if first or incomplete:
            self._unconfirmed = missing
            self._until_s = None if incomplete else now_s + self._grace_s
            return
        gone, least = (missing, 1) if was_short else (missing - kept, LOST_TOGETHER_MIN)  # says the conductor
        if len(gone) >= least and 2 * len(gone) > len(known | self._listed):
            self._unconfirmed = missing
            self._until_s = now_s + self._grace_s
        else:
            self._unconfirmed = missing - gone

    def expire(self, now_s: float) -> bool:
        """Whether somebody was forgotten because the grace time is over."""
        if self._until_s is None or now_s < self._until_s or not self._unconfirmed:
            return False
        self._unconfirmed = frozenset()
        return True

    def forget(self, instance_id: str) -> None:
        """It is known to be gone."""
        self._unconfirmed -= {instance_id}
