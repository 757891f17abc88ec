"""The room of idle objects, which nobody reads, so that other objects may have it. Pure."""

from __future__ import annotations

from collections.abc import Iterable

from pinyon.store.allocator import OffsetAllocator
from pinyon.store.kv_object import KvObject

NO_RUN_S = 1.0
"""The seconds for which it is believed that no idle objects side by side make room for an object of some size."""


class IdleRoom:
    """The sizes of the idle objects; it is told of each object that becomes idle or ceases to be."""

    def __init__(self, allocator: OffsetAllocator) -> None:
        self._allocator = allocator
        self._sizes: dict[int, int] = {}  # size with its rounding → objects
        self._no_run = (float("-inf"), 0)

    def count(self, held: KvObject, change: int) -> None:
        """Counts an object that became idle (``change`` 1) or is idle no more (-1)."""
        size = self._allocator.rounded(held.size)
        count = self._sizes.get(size, 0) + change
        if count:
            self._sizes[size] = count
        else:
            del self._sizes[size]

    @property
    def largest_bytes(self) -> int:
        """The size of the largest idle object, with its rounding."""
        return max(self._sizes, default=0)

    def side_by_side(self, object_bytes: int, now_s: float, every: Iterable[KvObject]) -> list[bytes]:
        """Returns the keys of neighbouring idle objects that make room together, as few bytes as possible; or none.

        That there are none is believed for ``NO_RUN_S``, so that repeated requests do not repeat the search."""
        looked_s, refused_bytes = self._no_run
        if now_s < looked_s + NO_RUN_S and object_bytes >= refused_bytes:
            return []
        idle = {held.offset: held.key for held in every}
        found = self._allocator.fewest_to_free(object_bytes, idle)
        if found is None:
            self._no_run = (now_s, object_bytes)
            return []
        return [idle[offset] for offset in found]
