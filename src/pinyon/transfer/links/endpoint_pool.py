"""Which endpoints (connections, queue pairs) there are, who uses them, and which go. Pure.

Mooncake §3.2.3, endpoint management: made on demand, pooled, their number capped, evicted by SIEVE. The pool only keeps
the books. Its caller serialises the calls, passes the clock, opens what :meth:`EndpointPool.reserve` made room for, and
closes what a method hands back.
"""

from __future__ import annotations

from collections.abc import Callable, Hashable
from dataclasses import dataclass, field
from typing import Generic, TypeVar

from pinyon.core.sieve import Sieve

K = TypeVar("K", bound=Hashable)
E = TypeVar("E", bound=Hashable)


@dataclass(slots=True, eq=False)
class _Entry(Generic[K]):
    key: K
    in_use: bool = True
    leaving: bool = False
    """Its path failed while it was in use: the release closes it."""


@dataclass(slots=True, eq=False)
class _Shelf(Generic[E]):
    """What belongs to one key."""

    idle: dict[E, float] = field(default_factory=dict)
    """With the time of release, in that order."""
    in_use: set[E] = field(default_factory=set)
    reserved: int = 0

    @property
    def size(self) -> int:
        return len(self.idle) + len(self.in_use) + self.reserved


class EndpointPool(Generic[K, E]):
    """At most ``cap`` endpoints over all keys and ``cap_per_key`` of one key, reservations included.

    An endpoint has one holder at a time, is never evicted or expired while in use, and leaves exactly once: the call
    that takes it out hands it (or False, or True from ``discard``) to the one caller who closes it. The accepting side
    uses ``reserve`` and ``add`` when a connection comes in, ``release`` between frames, ``take`` when the next begins.
    """

    def __init__(self, cap: int, cap_per_key: int) -> None:
        if cap < 1 or cap_per_key < 1:
            raise ValueError("the caps must be positive")
        self.cap = cap
        self.cap_per_key = cap_per_key
        self.closed = False
        self.evictions = 0
        """Endpoints closed to make room, so far."""
        self.reserved = 0
        """Endpoints being made."""
        self._entries: dict[E, _Entry[K]] = {}
        self._shelves: dict[K, _Shelf[E]] = {}
        self._sieve: Sieve[E] = Sieve()
        self._in_use = 0

    @property
    def open(self) -> int:
        """Endpoints in the pool, in use or idle."""
        return len(self._entries)

    @property
    def in_use(self) -> int:
        return self._in_use

    @property
    def idle(self) -> int:
        return len(self._entries) - self._in_use

    def count(self, key: K) -> int:
        """Endpoints of this key, reservations included."""
        shelf = self._shelves.get(key)
        return 0 if shelf is None else shelf.size

    def lease(self, key: K) -> E | None:
        """An idle endpoint of this key, the most recently used one; in use by the caller until it is released."""
        shelf = self._shelves.get(key)
        if shelf is None or not shelf.idle:
            return None
        endpoint = next(reversed(shelf.idle))
        self._use(endpoint, shelf)
        return endpoint

    def take(self, endpoint: E) -> bool:
        """Use this idle endpoint. False: it has left the pool. Raises ValueError: somebody uses it."""
        entry = self._entries.get(endpoint)
        if entry is None:
            return False
        if entry.in_use:
            raise ValueError(f"{endpoint!r} is in use")
        self._use(endpoint, self._shelves[entry.key])
        return True

    def _use(self, endpoint: E, shelf: _Shelf[E]) -> None:
        del shelf.idle[endpoint]
        shelf.in_use.add(endpoint)
        self._entries[endpoint].in_use = True
        self._in_use += 1
        self._sieve.touch(endpoint)

    def touch(self, endpoint: E) -> None:
        """It was used again without a lease of its own."""
        self._sieve.touch(endpoint)

    def reserve(self, key: K) -> list[E] | None:
        """Room for one new endpoint of this key, to be followed by ``add`` or ``cancel``. Returns the idle endpoints
        that made room, to be closed first: none, or one that SIEVE chose. Of the same key when that key is at its cap.
        ``None`` when all that could go is in use, or the pool is closed."""
        if self.closed:
            return None
        entries = self._entries
        shelf = self._shelves.get(key)
        evicted: list[E] = []
        if shelf is not None and shelf.size >= self.cap_per_key:
            if not shelf.idle:
                return None
            victim = self._sieve.evict(shelf.idle.__contains__)
        elif len(entries) + self.reserved >= self.cap:
            if len(entries) == self._in_use:
                return None
            victim = self._sieve.evict(lambda endpoint: not entries[endpoint].in_use)
        else:
            victim = None
        if victim is not None:
            self._forget(victim)
            self.evictions += 1
            evicted.append(victim)
        self._shelves.setdefault(key, _Shelf()).reserved += 1
        self.reserved += 1
        return evicted

    def add(self, key: K, endpoint: E) -> None:
        """The reservation's endpoint is there, in use by the caller. Raises ValueError: nothing is reserved for this
        key, or the endpoint is in the pool already."""
        if endpoint in self._entries:
            raise ValueError(f"{endpoint!r} is in the pool already")
        shelf = self._unreserve(key)
        shelf.in_use.add(endpoint)
        self._entries[endpoint] = _Entry(key)
        self._in_use += 1
        self._sieve.insert(endpoint)

    def cancel(self, key: K) -> None:
        """The reserved endpoint could not be made. Raises ``ValueError`` if nothing is reserved for this key."""
        self._drop_if_empty(key, self._unreserve(key))

    def _unreserve(self, key: K) -> _Shelf[E]:
        shelf = self._shelves.get(key)
        if shelf is None or not shelf.reserved:
            raise ValueError(f"nothing is reserved for {key!r}")
        shelf.reserved -= 1
        self.reserved -= 1
        return shelf

    def release(self, endpoint: E, now: float) -> bool:
        """The holder is done with it. False: it has left the pool, close it. Raises ValueError: it is not in use."""
        entry = self._entries.get(endpoint)
        if entry is None or not entry.in_use:
            raise ValueError(f"{endpoint!r} is not in use")
        if entry.leaving or self.closed:
            self._leave(endpoint)
            return False
        shelf = self._shelves[entry.key]
        shelf.in_use.remove(endpoint)
        shelf.idle[endpoint] = now
        entry.in_use = False
        self._in_use -= 1
        return True

    def discard(self, endpoint: E) -> bool:
        """It broke, in use or idle. True: it has left the pool by this call, close it; False: it had left before."""
        if endpoint not in self._entries:
            return False
        self._leave(endpoint)
        return True

    def drop(self, key: K) -> list[E]:
        """The path failed: all idle endpoints of this key leave, those in use leave when they are released."""
        shelf = self._shelves.get(key)
        if shelf is None:
            return []
        for endpoint in shelf.in_use:
            self._entries[endpoint].leaving = True
        return self._leave_all(list(shelf.idle))

    def drop_if(self, failed: Callable[[K], bool]) -> list[E]:
        """``drop`` for every key of which that is true."""
        return [endpoint for key in list(self._shelves) if failed(key) for endpoint in self.drop(key)]

    def expire(self, now: float, idle_s: float) -> list[E]:
        """Those not used for ``idle_s`` seconds leave."""
        latest = now - idle_s
        old: list[E] = []
        for shelf in self._shelves.values():
            for endpoint, released in shelf.idle.items():
                if released > latest:
                    break
                old.append(endpoint)
        return self._leave_all(old)

    def close(self) -> list[E]:
        """All idle endpoints leave, those in use when they are released; nothing is leased or reserved any more."""
        self.closed = True
        return self._leave_all([endpoint for shelf in self._shelves.values() for endpoint in shelf.idle])

    def _leave_all(self, endpoints: list[E]) -> list[E]:
        for endpoint in endpoints:
            self._leave(endpoint)
        return endpoints

    def _leave(self, endpoint: E) -> None:
        self._sieve.remove(endpoint)
        self._forget(endpoint)

    def _forget(self, endpoint: E) -> None:
        entry = self._entries.pop(endpoint)
        shelf = self._shelves[entry.key]
        if entry.in_use:
            shelf.in_use.remove(endpoint)
            self._in_use -= 1
        else:
            del shelf.idle[endpoint]
        self._drop_if_empty(entry.key, shelf)

    def _drop_if_empty(self, key: K, shelf: _Shelf[E]) -> None:
        if not shelf.size:
            del self._shelves[key]
