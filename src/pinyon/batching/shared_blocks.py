"""How much of their KV all requests of a batch share: what FEATHER calls the depth of the shared prefix."""

from __future__ import annotations

from collections.abc import Sequence

__all__ = ["shared_blocks"]


def shared_blocks(tables: Sequence[list[int]]) -> int:
    """Leading blocks that are the same in all of these block tables. O(requests · shared blocks), compared in C."""
    if not tables:
        return 0
    # What the smallest and the largest have in common, all between them have.
    first, last = min(tables), max(tables)
    count = min(len(first), len(last))
    if first[:count] == last[:count]:
        return count
    return next(place for place in range(count) if first[place] != last[place])
