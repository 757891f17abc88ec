"""Deadlines of many waiters, of which hardly any is ever reached. The caller that turns the wheel says how late it is.

This is a hashed timing wheel (Varghese and Lauck, SOSP '87, scheme 6) whose slots are made when they are needed.
Setting and removing a deadline are one dictionary operation each, however many there are.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class TimerWheel(Generic[Entry]):
    """A timer wheel: no entry is early, and none is later than ``tick_s`` (seconds) if it is turned that often."""

    def __init__(self, tick_s: float) -> None:
        """Creates an empty wheel. Raises :class:`ValueError` if ``tick_s`` is not positive."""
        if not tick_s > 0:
            raise ValueError(f"a tick must take some time, got {tick_s}")
        self._tick_s = tick_s
        self._slots: dict[int, dict[Entry, None]] = {}

    def __bool__(self) -> bool:
        return bool(self._slots)

    @property
    def first(self) -> int:
        """The number of the next slot, whose turn comes when the clock is at that tick. The wheel must not be empty."""
        return min(self._slots)

    def add(self, entry: Entry, due_s: float) -> int:
        """Adds an entry that is due at ``due_s``; returns its slot for :meth:`remove`. It may be there only once."""
        slot = int(due_s // self._tick_s) + 1
        entries = self._slots.get(slot)
        if entries is None:
            self._slots[slot] = {entry: None}
            self.opened(slot)
        else:
            entries[entry] = None
        return slot

    def opened(self, slot: int) -> None:
        """Learns that a slot has its first entry; subclasses may override this."""

    def remove(self, entry: Entry, slot: int) -> None:
        """Removes an entry that finished in time; does nothing if it is not there any more."""
        entries = self._slots.get(slot)
        if entries is not None:
            entries.pop(entry, None)
            if not entries:
                del self._slots[slot]

    def turn(self, now_s: float) -> list[Entry]:
        """Removes and returns the entries that are due by now, in the order of their slots."""
        now = int(now_s // self._tick_s)
        over = sorted([slot for slot in self._slots if slot <= now])
        return [entry for slot in over for entry in self._slots.pop(slot)]
