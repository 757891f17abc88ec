"""Least recently used goes first (Mooncake §3.2.1)."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Callable, Hashable, Iterable
from typing import Generic, TypeVar

from pinyon.eviction.policy import Traits, no_traits

__all__ = ["Lru"]

Item = TypeVar("Item", bound=Hashable)


class Lru(Generic[Item]):
    """Order of insertion and touch decides; clock and traits do not matter."""

    def __init__(self) -> None:
        self._order: OrderedDict[Item, None] = OrderedDict()

    def insert(
        self, items: Iterable[Item], now_s: float = 0.0, traits_of: Callable[[Item], Traits] = no_traits
    ) -> None:
        self._order.update((item, None) for item in items)

    def touch(self, item: Item, now_s: float = 0.0) -> None:
        self._order.move_to_end(item)

    def remove(self, items: Iterable[Item]) -> None:
        order = self._order
        for item in items:
            del order[item]

    def victim(self, now_s: float = 0.0) -> Item | None:
        return self._order.popitem(last=False)[0] if self._order else None

    def __len__(self) -> int:
        return len(self._order)

    def __contains__(self, item: object) -> bool:
        return item in self._order
