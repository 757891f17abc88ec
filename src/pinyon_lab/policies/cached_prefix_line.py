"""Requests that wait for KV memory, in an order by what of their prompts is cached: SGLang's cache-aware policies.

What is cached is known from a radix tree of the prompts that were admitted here, those used least lately dropped: close
to what the pool holds, and kept for the sake of what it costs, which FEATHER compares (§3.4, §5.3.1).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from typing import Protocol

from pinyon.batching.policy import BatchRequest
from pinyon.batching.waiting_line import AgainFirst
from pinyon_lab.policies.radix_tree import RadixTree

__all__ = ["ByCachedPrefix", "CachedPrefixSettings", "PrefixOrder"]


@dataclass(frozen=True, slots=True)
class CachedPrefixSettings:
    """``tree_blocks``: keys that the radix tree holds."""

    tree_blocks: int = 65_536

    def __post_init__(self) -> None:
        if not 1 <= self.tree_blocks <= 1 << 24:
            raise ValueError("tree_blocks must be from 1 to 16777216")


class PrefixOrder(Protocol):
    def ordered(self, tree: RadixTree, waiting: Mapping[int, BatchRequest]) -> list[int]:
        """The numbers of those that wait, who come as they came; first whom to admit first."""
        ...


class ByCachedPrefix(AgainFirst):
    """See :class:`pinyon.batching.interface.WaitingLine`.

    The order is made anew at each time at which somebody could be admitted, as SGLang does before each of its batches.
    Nothing bounds how long somebody is passed over.
    """

    def __init__(self, order: PrefixOrder, settings: CachedPrefixSettings) -> None:
        super().__init__()
        self._order = order
        self._tree = RadixTree(settings.tree_blocks)
        self._ordered: list[int] = []
        """Of those, at this time; none: it was not asked for yet."""
        self._now_s = -1.0
        self._room = 0

    def add(self, request: BatchRequest, again: bool) -> None:
        if again:
            self._again.add(request, again)
        else:
            self._new[request.number] = request
            self._ordered.clear()

    def remove(self, number: int) -> bool:
        if self._new.pop(number, None) is None:
            return self._again.remove(number)
        if self._ordered:
            self._ordered.remove(number)
        return True

    def begin(self, now_s: float, room_blocks: int) -> None:
        if now_s != self._now_s:
            self._ordered.clear()
        self._now_s, self._room = now_s, room_blocks

    def at(self, place: int) -> BatchRequest | None:
        request = self._again.at(place)
        if request is not None:
            return request
        place -= len(self._again)
        if place >= len(self._new) or self._room < 1:
            return None
        if not self._ordered:
            self._ordered = self._order.ordered(self._tree, self._new)
        return self._new[self._ordered[place]]

    def take(self, number: int, room_blocks: int) -> None:
        self._room = room_blocks
        request = self._again.get(number)
        if request is None:
            request = self._new.pop(number)
            self._ordered.remove(number)
        else:
            self._again.take(number, room_blocks)
        self._tree.insert(request.block_keys)

    def adopt(self, request: BatchRequest) -> None:
        self._tree.insert(request.block_keys)
