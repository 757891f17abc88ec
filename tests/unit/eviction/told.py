"""A policy that keeps what it was told."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

from pinyon.eviction import Lru, Traits


class Told(Lru[bytes]):
    """LRU with a record of its calls that named keys: ``events`` are ``(name, keys, traits, offsets, after)``."""

    def __init__(self) -> None:
        super().__init__()
        self.events: list[tuple[Any, ...]] = []

    def _note(self, name: str, keys: Sequence[bytes], *more: Any) -> None:
        if keys:
            self.events.append((name, list(keys), *more))

    def stored(
        self, keys: Sequence[bytes], now_s: float, traits: Traits, offsets: Sequence[int], after: bytes | None = None
    ) -> None:
        self._note("stored", keys, traits, list(offsets), after)
        super().stored(keys, now_s, traits, offsets, after)

    def stored_pinned(
        self, keys: Sequence[bytes], now_s: float, traits: Traits, offsets: Sequence[int], after: bytes | None = None
    ) -> None:
        self.stored(keys, now_s, traits, offsets, after)
        self.pinned(keys, now_s)

    def used(self, keys: Sequence[bytes], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        self._note("used", keys, traits, list(offsets))
        super().used(keys, now_s, traits, offsets)

    def pinned(self, keys: Sequence[bytes], now_s: float) -> None:
        self._note("pinned", keys)
        super().pinned(keys, now_s)

    def unpinned(self, keys: Sequence[bytes], now_s: float) -> None:
        self._note("unpinned", keys)
        super().unpinned(keys, now_s)

    def dropped(self, keys: Sequence[bytes], now_s: float) -> None:
        self._note("dropped", keys)
        super().dropped(keys, now_s)

    def take(self) -> list[tuple[Any, ...]]:
        events, self.events = self.events, []
        return events
