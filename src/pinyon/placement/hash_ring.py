"""Consistent hashing with virtual nodes (DualMap §3.4; Karger et al. 1997)."""

from __future__ import annotations

from bisect import bisect_left
from collections.abc import Sequence

import xxhash

__all__ = ["HashRing"]


class HashRing:
    """Points of members on a circle of 2^64. A key belongs to the member of the next point clockwise, so that with one
    member more or less only the keys of its arcs go elsewhere."""

    def __init__(self, members: Sequence[str], virtual_nodes: int, seed: int) -> None:
        """``members``: different names, at least one; the same ring comes of them in any order."""
        points = sorted(
            (xxhash.xxh3_64_intdigest(f"{name}\0{number}".encode(), seed), name)
            for name in members
            for number in range(virtual_nodes)
        )
        self._at = [at for at, _ in points]
        self._names = [name for _, name in points]
        self._seed = seed

    def owner(self, key: bytes, other_than: str | None = None) -> str | None:
        """Whose it is; with ``other_than`` the next one clockwise that is another. None: there is no other."""
        names = self._names
        start = bisect_left(self._at, xxhash.xxh3_64_intdigest(key, self._seed))
        for step in range(len(names)):
            name = names[(start + step) % len(names)]
            if name != other_than:
                return name
        return None
