"""The consistency check of a block pool's books."""

from __future__ import annotations

from collections.abc import Sequence

from pinyon.eviction.evictor import Evictor
from pinyon.paging.contents import Contents
from pinyon.paging.second_tier import SecondTier


def pool_faults(
    free: Sequence[int],
    refs: Sequence[int],
    contents: Contents,
    eviction: Evictor[bytes],
    below: SecondTier | None,
) -> list[str]:
    """Returns the inconsistencies of a pool's books, in words. O(blocks).

    ``refs`` has the reference count of each block, ``eviction`` the keys that are in blocks.
    """
    key_of = contents.key_of
    faults = [
        (len(set(free)) != len(free), "a block is free twice"),
        (any(refs[block] or key_of[block] is not None for block in free), "a free block is in use"),
        (any(held < 0 for held in refs), "a negative reference count"),
        (
            any((key in eviction) != (not held and key is not None) for key, held in zip(key_of, refs, strict=True)),
            "evictable is not what is cached",
        ),
        (
            len(free) + len(eviction) + sum(held > 0 for held in refs) != len(refs),
            "free + cached + used is not the total",
        ),
    ]
    broken = [text for wrong, text in faults if wrong] + contents.faults()
    if below is not None:
        broken += below.faults()
        both = len(below.eviction) != len(eviction) + len(below)
        broken += ["a key in both tiers"] * any(key in below for key in contents.block_of)
        broken += ["evictable in both tiers is not what is cached in both"] * both
    return broken
