"""Which instances a load balancer knows: those listed now, and those that a conductor before this one listed.

A conductor that has just started knows nobody until they have registered with it, and says so by an empty or short
list. That is no news of the others. So whoever was listed before a conductor began to speak stays until that conductor
has listed it (from then on its word counts), says that its list is whole, or a grace time is over. The same goes for
those who vanish from one list to the next together, as most of them: it is the conductor that lost them, not they that
all died at once.
"""

from __future__ import annotations

from collections.abc import Iterable

__all__ = ["Roster"]


LOST_TOGETHER_MIN = 2


class Roster:
    """``grace_s`` counts from a conductor's first whole list, or the loss: while none speaks, what was known stays."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._listed: frozenset[str] = frozenset()
        self._unconfirmed: set[str] = set()
        self._until_s: float | None = None
        self._began_short = False

    @property
    def unconfirmed(self) -> frozenset[str]:
        """Those that this conductor has said nothing about yet."""
        return frozenset(self._unconfirmed)

    def listed(self, ids: Iterable[str], now_s: float, *, first: bool = False, incomplete: bool = False) -> None:
        """A conductor's list: its ``first`` one if it has just begun to speak, ``incomplete`` if it says so."""
        if first:
            self._unconfirmed |= self._listed
            self._until_s = None
            self._began_short = incomplete
        before, self._listed = self._listed, frozenset(ids)
        self._unconfirmed -= self._listed
        if incomplete:
            self._until_s = None
        elif self._began_short:  # it knew that it did not know all, and now it does
            self._unconfirmed.clear()
            self._began_short = False
        elif self._until_s is None:
            self._until_s = now_s + self._grace_s
        lost = frozenset() if first else before - self._listed
        if len(lost) >= LOST_TOGETHER_MIN and 2 * len(lost) > len(before):
            self._unconfirmed |= lost
            self._until_s = None if incomplete else now_s + self._grace_s

    def expire(self, now_s: float) -> bool:
        """Whether somebody was forgotten because the grace time is over."""
        if self._until_s is None or now_s < self._until_s or not self._unconfirmed:
            return False
        self._unconfirmed.clear()
        return True

    def forget(self, instance_id: str) -> None:
        """It is known to be gone."""
        self._unconfirmed.discard(instance_id)
