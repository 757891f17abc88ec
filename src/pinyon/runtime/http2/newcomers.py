"""Connections whose peers have not shown who they are: each address has a share, and the oldest make room. No I/O."""

from __future__ import annotations

from collections.abc import Callable, Hashable


class Newcomers:
    """Those that are known are no part of it: they are displaced by nobody."""

    def __init__(self, share: int) -> None:
        """``share`` is how many of them one address may have."""
        self._share = share
        self._addresses: dict[Hashable, str] = {}
        self._ends: dict[str, dict[Hashable, Callable[[], object]]] = {}
        """By address, the oldest first: what ends a connection."""

    def __len__(self) -> int:
        return len(self._addresses)

    def enter(self, connection: Hashable, address: str, end: Callable[[], object]) -> None:
        """If it is one more than its address may have, the oldest of that is ended."""
        self._addresses[connection] = address
        crowd = self._ends.setdefault(address, {})
        crowd[connection] = end
        if len(crowd) > self._share:
            self._end_oldest(crowd)

    def leave(self, connection: Hashable) -> None:
        """It is known, or over. Calling it again is fine."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            crowd = self._ends[address]
            del crowd[connection]
            if not crowd:
                del self._ends[address]

    def make_room(self) -> bool:
        """End the oldest of the address that has most; False if there is nobody. O(addresses)."""
        if not self._ends:
            return False
        self._end_oldest(max(self._ends.values(), key=len))
        return True

    def _end_oldest(self, crowd: dict[Hashable, Callable[[], object]]) -> None:
        oldest, end = next(iter(crowd.items()))
        self.leave(oldest)
        end()
