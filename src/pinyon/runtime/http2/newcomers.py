"""Connections of still unknown peers: each address has a share of them, and the oldest make room. No I/O.

An address is what the caller counts as one peer, such as an IPv6 /64.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable


class Newcomers:
    """The connections of unknown peers; those of known peers are not in it, and are never displaced."""

    def __init__(self, share: int) -> None:
        """Takes the ``share``: how many of these connections one address may have."""
        self._share = share
        self._addresses: dict[Hashable, str] = {}
        self._ends: dict[str, dict[Hashable, Callable[[], object]]] = {}
        """The functions that end connections, by address and connection, the oldest first."""

    def __len__(self) -> int:
        return len(self._addresses)

    def enter(self, connection: Hashable, address: str, end: Callable[[], object]) -> None:
        """Adds a connection; if its address has too many, the oldest of them is ended."""
        self._addresses[connection] = address
        crowd = self._ends.setdefault(address, {})
        crowd[connection] = end
        if len(crowd) > self._share:
            self._end_oldest(crowd)

    def leave(self, connection: Hashable) -> None:
        """Takes out a connection whose peer is known, or that is over. Calling it again is fine."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            crowd = self._ends[address]
            del crowd[connection]
            if not crowd:
                del self._ends[address]

    def make_room(self) -> bool:
        """Ends the oldest connection of the address that has most; returns False if there is none. O(addresses)."""
        if not self._ends:
            return False
        self._end_oldest(max(self._ends.values(), key=len))
        return True

    def _end_oldest(self, crowd: dict[Hashable, Callable[[], object]]) -> None:
        oldest, end = next(iter(crowd.items()))
        self.leave(oldest)
        end()
