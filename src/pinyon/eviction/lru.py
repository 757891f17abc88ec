"""The LRU policy: the least recently used key goes first (Mooncake §3.2.1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Sequence
from typing import Generic

from pinyon.eviction.interface import Key, Traits


class Lru(Generic[Key]):
    """Keys by last use, which ends for a pinned key when it is unpinned. Worth: minus the seconds since then."""

    def __init__(self) -> None:
        self._order: OrderedDict[Key, float] = OrderedDict()
        """The time of the last use of each key that may go."""

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        self._append(keys, now_s)

    def stored_pinned(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        """Does nothing, as a pinned key's last use has not ended."""

    def _append(self, keys: Sequence[Key], now_s: float) -> None:
        order = self._order
        for key in reversed(keys):
            order[key] = now_s

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        order = self._order
        if order.keys().isdisjoint(keys):
            return
        for key in reversed(keys):
            if key in order:
                order[key] = now_s
                order.move_to_end(key)

    def pinned(self, keys: Sequence[Key], now_s: float) -> None:
        order = self._order
        for key in keys:
            del order[key]

    def unpinned(self, keys: Sequence[Key], now_s: float) -> None:
        self._append(keys, now_s)

    def dropped(self, keys: Sequence[Key], now_s: float) -> None:
        for key in keys:
            self._order.pop(key, None)

    def victims(self, count: int, now_s: float) -> list[Key]:
        order = self._order
        popitem = order.popitem
        return [popitem(last=False)[0] for _ in range(min(count, len(order)))]

    def peek(self, now_s: float) -> tuple[float, Key] | None:
        for key, last_s in self._order.items():
            return last_s - now_s, key
        return None

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, key: object) -> bool:
        return key in self._order
