"""How often NIXL is tried with a process that is a peer. Pure.

UCX does not give a connection back while the peer lives: each one that is ended and made anew leaves a descriptor open
at both ends (1.5.1). So a connection is kept for as long as its peer lives, and those that had to be made anew all the
same are counted.
"""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

MOST_CONNECTIONS = 16
"""To one process, as long as it lives."""
MOST_FAILED_PROOFS = 3
"""One after another."""
_MOST_REMEMBERED = 1 << 14
"""Processes; above it the one that was tried least recently is new again."""


@dataclass(slots=True)
class _Record:
    connections: int = 0
    failed: int = 0


class Attempts:
    """By agents' names, which are processes' boot ids."""

    def __init__(self) -> None:
        self._records: OrderedDict[str, _Record] = OrderedDict()

    def connects(self, name: str) -> None:
        """A connection is about to be made."""
        self._record(name).connections += 1

    def proved(self, name: str) -> None:
        """It is read without taking part."""
        self._record(name).failed = 0

    def failed(self, name: str) -> None:
        """That was to be proved, and was not."""
        self._record(name).failed += 1

    def refusal(self, name: str, *, connected: bool) -> str | None:
        """Why NIXL is not used any more with this process, in words for people; None: it may be."""
        record = self._records.get(name)
        if record is None:
            return None
        if record.failed >= MOST_FAILED_PROOFS:
            return f"{record.failed} times it was not read without taking part"
        if record.connections >= MOST_CONNECTIONS and not connected:
            return f"{record.connections} connections to it were made already, which UCX does not give back"
        return None

    def _record(self, name: str) -> _Record:
        record = self._records.setdefault(name, _Record())
        self._records.move_to_end(name)
        if len(self._records) > _MOST_REMEMBERED:
            self._records.popitem(last=False)
        return record
