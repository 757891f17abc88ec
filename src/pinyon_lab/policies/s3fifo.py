"""S3-FIFO (Yang et al., "FIFO queues are all you need for cache eviction", SOSP '23, Algorithm 1).

New keys enter a small queue, a tenth of the cache. Keys that were used more than once there move to the main queue; the
others are evicted and their names remembered. A key that comes back while its name is known enters the main queue at
once. The main queue evicts keys that were not used since it last looked at them."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic

from pinyon.eviction.interface import Key, Traits

SMALL_SHARE = 0.1
FREQUENCY_MAX = 3


class _Queued(Generic[Key]):
    __slots__ = ("frequency", "last_s", "parked", "pinned", "queue")

    def __init__(self, queue: OrderedDict[Key, None], now_s: float) -> None:
        self.queue = queue
        self.frequency = 0
        self.pinned = False
        self.parked = False
        """True if its turn to be evicted came while it was pinned: it is out of its queue, and next when it is
        unpinned."""
        self.last_s = now_s


class S3Fifo(Generic[Key]):
    """An S3-FIFO policy with as many remembered names as main keys; worth: the time since the last use, negated."""

    def __init__(self) -> None:
        self._held: dict[Key, _Queued[Key]] = {}
        self._small: OrderedDict[Key, None] = OrderedDict()
        self._main: OrderedDict[Key, None] = OrderedDict()
        self._ghosts: OrderedDict[Key, None] = OrderedDict()
        self._pinned = 0

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        ghosts = self._ghosts
        for key in reversed(keys):
            known = key in ghosts
            if known:
                del ghosts[key]
            queue = self._main if known else self._small
            self._held[key] = _Queued(queue, now_s)
            queue[key] = None

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        held = self._held
        for key in keys:
            entry = held[key]
            entry.last_s = now_s
            if entry.frequency < FREQUENCY_MAX:
                entry.frequency += 1

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            self._held[key].pinned = True
        self._pinned += len(keys)

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        self._pinned -= len(keys)
        for key in keys:  # of the parked keys, the last one is evicted next
            entry = self._held[key]
            entry.pinned = False
            if entry.parked:
                entry.parked = False
                entry.queue[key] = None
                entry.queue.move_to_end(key, last=False)
                if entry.queue is self._main and not entry.frequency:
                    entry.frequency = 1  # the key was in use until now

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            entry = self._held.pop(key)
            self._pinned -= entry.pinned
            entry.queue.pop(key, None)

    def victims(self, count: int, now_s: float) -> list[Key]:
        gone: list[Key] = []
        while len(gone) < count and (key := self._next()) is not None:
            entry = self._held.pop(key)
            del entry.queue[key]
            if entry.queue is self._small:
                self._remember(key)
            gone.append(key)
        return gone

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        key = self._next()
        return None if key is None else (self._held[key].last_s - now_s, key)

    def _next(self) -> Key | None:
        """Returns the key whose turn it is to be evicted, after those before it have moved on."""
        small, main, held = self._small, self._main, self._held
        while len(held) > self._pinned:
            queue = small if small and (len(small) >= SMALL_SHARE * len(held) or not main) else main
            key = next(iter(queue))
            entry = held[key]
            if entry.pinned:
                del queue[key]
                entry.parked = True
            elif queue is small and entry.frequency > 1:
                del small[key]
                entry.queue, entry.frequency = main, 0
                main[key] = None
            elif queue is main and entry.frequency > 0:
                main.move_to_end(key)
                entry.frequency -= 1
            else:
                return key
        return None

    def _remember(self, key: Key) -> None:
        self._ghosts[key] = None
        while len(self._ghosts) > (1 - SMALL_SHARE) * (len(self._held) + 1):
            self._ghosts.popitem(last=False)

    def __len__(self) -> int:
        return len(self._held) - self._pinned

    def __contains__(self, key: object) -> bool:
        entry = self._held.get(key)  # type: ignore[arg-type]
        return entry is not None and not entry.pinned
