"""Places for messages that arrive from clients' programs, limited in total and per sender."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator, Iterator
from contextlib import asynccontextmanager, contextmanager

from pinyon.core.errors import ResourceExhausted

ALL_MAX = 256
EACH_MAX = 64


class Arrivals:
    """The places, for one event loop. Senders go by name; a sender that holds no place is forgotten."""

    def __init__(self, all_max: int = ALL_MAX, each_max: int = EACH_MAX) -> None:
        self._each_max = each_max
        self._all = asyncio.Semaphore(all_max)
        self._each: dict[str, tuple[asyncio.Semaphore, set[object]]] = {}
        self._staying: dict[str, int] = {}

    def __len__(self) -> int:
        """Returns the number of senders that hold or wait for a place."""
        return len(self._each.keys() | self._staying.keys())

    @asynccontextmanager
    async def place(self, name: str) -> AsyncIterator[None]:
        """Waits for a place, in the order of asking; the caller limits how long."""
        own, here = self._each.setdefault(name, (asyncio.Semaphore(self._each_max), set()))
        ticket = object()
        here.add(ticket)
        try:
            async with own, self._all:
                yield
        finally:
            here.discard(ticket)
            if not here:
                del self._each[name]

    @contextmanager
    def stay(self, name: str) -> Iterator[None]:
        """Takes a place for a call that may last long; raises :class:`ResourceExhausted` if there is none now."""
        count = self._staying.get(name, 0)
        if count >= self._each_max:
            raise ResourceExhausted("too many of these calls at once", retry_after_s=1.0)
        self._staying[name] = count + 1
        try:
            yield
        finally:
            if left := self._staying[name] - 1:
                self._staying[name] = left
            else:
                del self._staying[name]
