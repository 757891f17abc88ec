"""The books of endpoints (connections, queue pairs): which exist, which are in use, and which must go. Pure.

Mooncake §3.2.3, endpoint management: made on demand, pooled, their number capped, evicted by SIEVE. The pool only keeps
the books. Its caller serialises the calls, passes the clock, opens endpoints for which :meth:`EndpointPool.reserve`
made room, and closes those that a method hands back.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

from pinyon.core.sieve import Sieve

K = TypeVar("K", bound=Hashable)
E = TypeVar("E", bound=Hashable)


class EndpointPool(Generic[K, E]):
    """A pool of at most ``cap`` endpoints over all keys and ``cap_per_key`` of one key, reservations included.

    An endpoint has one holder at a time, and is never evicted or expired while in use. It leaves exactly once: the call
    that takes it out hands it (or False, or True from ``discard``) to the one caller who closes it.
    """

    def __init__(self, cap: int, cap_per_key: int) -> None:
        if cap < 1 or cap_per_key < 1:
            raise ValueError("the caps must be positive")
        self.cap = cap
        self.cap_per_key = cap_per_key
        self.closed = False
        """True from when its owner says so: nothing is reserved any more, and endpoints in use leave when released."""
        self.reserved = 0
        """Number of endpoints being made."""
        self._keys: dict[E, K] = {}
        self._counts: Counter[K] = Counter()
        """Number of endpoints per key, with those being made."""
        self._idle: dict[K, dict[E, float]] = {}
        """Idle endpoints with the time of their release, in that order; every key has at least one."""
        self._sieve: Sieve[E] = Sieve()

    @property
    def open(self) -> int:
        """Number of endpoints in the pool, in use or idle."""
        return len(self._keys)

    def lease(self, key: K) -> E | None:
        """Returns the key's most recently used idle endpoint, or None; the caller uses it until it is released."""
        idle = self._idle.get(key)
        if idle is None:
            return None
        endpoint = next(reversed(idle))
        self._wake(endpoint)
        self._sieve.touch(endpoint)
        return endpoint

    def _is_idle(self, endpoint: E) -> bool:
        return endpoint in self._idle.get(self._keys[endpoint], ())

    def _wake(self, endpoint: E) -> None:
        key = self._keys[endpoint]
        idle = self._idle[key]
        del idle[endpoint]
        if not idle:
            del self._idle[key]

    def touch(self, endpoint: E) -> None:
        """Notes that the endpoint was used again without a lease of its own."""
        self._sieve.touch(endpoint)

    def reserve(self, key: K) -> list[E] | None:
        """Reserves room for one new endpoint of this key, to be followed by ``add`` or ``cancel``.

        Returns the idle endpoints to close first: none, or one that SIEVE chose, of the same key when that key is at
        its cap. Returns None when all that could go is in use, or the pool is closed."""
        if self.closed:
            return None
        evicted: list[E] = []
        if self._counts[key] >= self.cap_per_key:
            if key not in self._idle:
                return None
            victim = self._sieve.evict(self._idle[key].__contains__)
        elif len(self._keys) + self.reserved >= self.cap:
            if not self._idle:
                return None
            victim = self._sieve.evict(self._is_idle)
        else:
            victim = None
        if victim is not None:
            self._forget(victim)
            evicted.append(victim)
        self._counts[key] += 1
        self.reserved += 1
        return evicted

    def add(self, key: K, endpoint: E) -> None:
        """Adds the reserved endpoint, which is in use by the caller."""
        self.reserved -= 1
        self._keys[endpoint] = key
        self._sieve.insert(endpoint)

    def cancel(self, key: K) -> None:
        """Cancels a reservation whose endpoint could not be made."""
        self.reserved -= 1
        self._uncount(key)

    def release(self, endpoint: E, now: float) -> bool:
        """Takes an endpoint back; False: it left the pool and must be closed. Raises ValueError if it is not in use."""
        key = self._keys.get(endpoint)
        if key is None or self._is_idle(endpoint):
            raise ValueError(f"{endpoint!r} is not in use")
        if self.closed:
            self._leave(endpoint)
            return False
        self._idle.setdefault(key, {})[endpoint] = now
        return True

    def discard(self, endpoint: E) -> bool:
        """Takes out an endpoint that broke. True: it left by this call and must be closed. False: it had left."""
        if endpoint not in self._keys:
            return False
        self._leave(endpoint)
        return True

    def drop(self, failed: Callable[[K], bool]) -> tuple[list[E], list[E]]:
        """Takes out all idle endpoints of keys that failed; returns them, and those in use."""
        used = [endpoint for endpoint, key in self._keys.items() if failed(key) and not self._is_idle(endpoint)]
        idle = [endpoint for key, shelf in self._idle.items() if failed(key) for endpoint in shelf]
        return self._leave_all(idle), used

    def expire(self, now: float, idle_s: float) -> list[E]:
        """Takes out and returns the endpoints that were not used for ``idle_s`` seconds."""
        latest = now - idle_s
        return self._leave_all(
            [endpoint for idle in self._idle.values() for endpoint, released in idle.items() if released <= latest]
        )

    def _leave_all(self, endpoints: list[E]) -> list[E]:
        for endpoint in endpoints:
            self._leave(endpoint)
        return endpoints

    def _leave(self, endpoint: E) -> None:
        self._sieve.remove(endpoint)
        self._forget(endpoint)

    def _forget(self, endpoint: E) -> None:
        if self._is_idle(endpoint):
            self._wake(endpoint)
        self._uncount(self._keys.pop(endpoint))

    def _uncount(self, key: K) -> None:
        self._counts[key] -= 1
        if not self._counts[key]:
            del self._counts[key]
