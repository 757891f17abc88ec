"""Deadlines of many, of which hardly any is ever reached. Who turns the wheel says how late it is.

A hashed timing wheel (Varghese and Lauck, SOSP '87, scheme 6) whose slots are made when they are needed: to set a
deadline and to take it back are one operation of a dictionary each, however many there are.
"""

from __future__ import annotations

from typing import Generic, TypeVar

Entry = TypeVar("Entry")


class TimerWheel(Generic[Entry]):
    """Nothing is early, and nothing later than ``tick_s`` (seconds) if it is turned that often."""

    def __init__(self, tick_s: float) -> None:
        """Raises :class:`ValueError` if ``tick_s`` is not positive."""
        if not tick_s > 0:
            raise ValueError(f"a tick must take some time, got {tick_s}")
        self._tick_s = tick_s
        self._slots: dict[int, dict[Entry, None]] = {}

    def __bool__(self) -> bool:
        """Somebody is waited for."""
        return bool(self._slots)

    @property
    def first(self) -> int:
        """The slot whose turn is next: it comes when so many ticks have passed. There is one."""
        return min(self._slots)

    def add(self, entry: Entry, due_s: float) -> int:
        """At ``due_s`` it is over. Returns its slot, for :meth:`remove`; an entry is there once at a time."""
        slot = int(due_s // self._tick_s) + 1
        entries = self._slots.get(slot)
        if entries is None:
            self._slots[slot] = {entry: None}
            self.opened(slot)
        else:
            entries[entry] = None
        return slot

    def opened(self, slot: int) -> None:
        """Called when somebody is the first to wait for the turn of a slot."""

    def remove(self, entry: Entry, slot: int) -> None:
        """It came in time. Nothing happens if it is not there any more."""
        entries = self._slots.get(slot)
        if entries is not None:
            entries.pop(entry, None)
            if not entries:
                del self._slots[slot]

    def turn(self, now_s: float) -> list[Entry]:
        """Those that are over by now, which are gone with this: by slot the earliest first."""
        now = int(now_s // self._tick_s)
        over = sorted([slot for slot in self._slots if slot <= now])
        return [entry for slot in over for entry in self._slots.pop(slot)]
