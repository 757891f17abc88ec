"""The instances that a load balancer knows: those listed now, and those known from before.

A conductor that has just started knows no instance until some register with it, and so sends an empty or short list.
That says nothing about the others. An instance known from before stays until the conductor has listed it (from then on,
its lists count), says that its list is complete, or a grace time is over. If most known instances vanish at once from a
list taken as complete, the conductor has lost them, as they hardly died together: they stay for the grace time, too."""

from __future__ import annotations

from collections.abc import Iterable

LOST_TOGETHER_MIN = 2
"""Missing instances at which the conductor is blamed. A single one counts as gone unless the last list was short."""


class Roster:
    """The instances that one load balancer knows. While no conductor answers, all of them stay."""

    def __init__(self, grace_s: float) -> None:
        self._grace_s = grace_s
        self._listed: frozenset[str] = frozenset()
        self.unconfirmed: frozenset[str] = frozenset()
        """Instances that are known from before and have not been listed."""
        self._until_s: float | None = None
        self._short = False
        """True if the last list was incomplete by the conductor's own account."""

    def listed(self, ids: Iterable[str], now_s: float, *, first: bool = False, incomplete: bool = False) -> None:
        """Takes a conductor's list: ``first`` if it has just begun to speak, ``incomplete`` if it says so."""
        known, kept = self._listed | self.unconfirmed, self.unconfirmed
        self._listed = frozenset(ids)
        missing = known - self._listed
        was_short, self._short = self._short, incomplete
        if first or incomplete:
            self.unconfirmed = missing
            self._until_s = None if incomplete else now_s + self._grace_s
            return
        gone, least = (missing, 1) if was_short else (missing - kept, LOST_TOGETHER_MIN)  # gone by the conductor's word
        if len(gone) >= least and 2 * len(gone) > len(known | self._listed):
            self.unconfirmed = missing
            self._until_s = now_s + self._grace_s
        else:
            self.unconfirmed = missing - gone

    def expire(self, now_s: float) -> bool:
        """Forgets the unconfirmed instances once the grace time is over. Returns whether any were forgotten."""
        if self._until_s is None or now_s < self._until_s or not self.unconfirmed:
            return False
        self.unconfirmed = frozenset()
        return True

    def forget(self, instance_id: str) -> None:
        """Forgets an instance that is known to be gone."""
        self.unconfirmed -= {instance_id}
