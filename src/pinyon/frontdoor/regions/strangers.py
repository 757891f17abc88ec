"""Sessions of those that have not proved yet what they are: so many at once, and a newcomer always has a place.

Whoever proves itself needs a few round trips for it. So when all places are taken, a session of the address that holds
most of them ends, any of them: somebody who fills the place with silent sessions pushes out his own, and a load
balancer that comes from his address is met by few of his further ones before it is known.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from urllib.parse import unquote

from pinyon.core.address import network_of

__all__ = ["Stranger", "Strangers", "address_of"]


class Stranger:
    """One session until it is known, or over."""

    __slots__ = ("_all", "_end", "address")

    def __init__(self, everybody: Strangers, address: str, end: Callable[[], None]) -> None:
        self.address = address
        self._all = everybody
        self._end = end

    def leave(self) -> None:
        """Its place is free. Calling it again is fine."""
        self._all._leave(self)

    def _evict(self) -> None:
        self.leave()
        self._end()


class Strangers:
    """Of one load balancer; ``chance`` says whose session ends."""

    def __init__(self, limit: int, chance: random.Random) -> None:
        self._limit = limit
        self._chance = chance
        self._by_address: dict[str, list[Stranger]] = {}
        self._count = 0

    def __len__(self) -> int:
        return self._count

    def enter(self, address: str, end: Callable[[], None]) -> Stranger:
        """``end`` is called if it has to make room for another one."""
        if self._count >= self._limit:
            most = max(len(each) for each in self._by_address.values())
            crowd = [each for sessions in self._by_address.values() if len(sessions) == most for each in sessions]
            self._chance.choice(crowd)._evict()
        stranger = Stranger(self, address, end)
        self._by_address.setdefault(address, []).append(stranger)
        self._count += 1
        return stranger

    def _leave(self, stranger: Stranger) -> None:
        sessions = self._by_address.get(stranger.address, [])
        if stranger not in sessions:
            return
        sessions.remove(stranger)
        self._count -= 1
        if not sessions:
            del self._by_address[stranger.address]


def address_of(peer: str) -> str:
    """Of what gRPC calls a peer (``ipv4:10.0.0.1:5``, ``ipv6:%5B::1%5D:5``): who has one of a /64 has them all."""
    kind, _, rest = peer.partition(":")
    if kind not in ("ipv4", "ipv6"):
        return kind
    return network_of(unquote(rest).rpartition(":")[0].strip("[]"))
