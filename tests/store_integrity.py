"""Checks that the books of a store node's object table balance."""

from __future__ import annotations

from collections import Counter

from pinyon.store.allocator import OffsetAllocator
from pinyon.store.objects import ObjectTable


def check_allocator(allocator: OffsetAllocator) -> None:
    """Checks that taken ranges and holes tile the pool and that no two holes touch. O(n log n)."""
    end, was_hole = 0, False
    for offset, size, hole in sorted(
        [(*each, False) for each in allocator._taken.items()] + [(*each, True) for each in allocator._hole_at.items()]
    ):
        assert offset == end, f"a gap or an overlap at byte {offset}"
        assert size > 0
        assert not offset % allocator._alignment
        assert not (hole and was_hole), f"two holes touch at byte {offset}"
        end, was_hole = offset + size, hole
    assert end == allocator.capacity_bytes
    assert allocator.used_bytes == sum(allocator._taken.values())
    listed = {offset: size for size, offsets in allocator._holes.items() for offset in offsets}
    ends = {offset + size: offset for offset, size in allocator._hole_at.items()}
    assert (listed, ends) == (allocator._hole_at, allocator._hole_before)
    assert allocator._sizes == sorted(allocator._holes)


def check_table(table: ObjectTable) -> None:
    """Checks the table, with its allocator. O(objects log objects)."""
    allocator, readable, reserved, eviction = table._allocator, table._readable, table._reserved, table.eviction
    check_allocator(allocator)
    evictable = [held for held in readable.values() if not held.readers]
    assert not set(readable) & set(reserved), "a key is readable and reserved"
    assert all((held.key in eviction) != bool(held.readers) for held in readable.values())
    assert len(eviction) == len(evictable), "the eviction policy holds something else"
    assert Counter(allocator.rounded(held.size) for held in evictable) == table._idle._sizes
    being_put = [*table._puts._leases.values(), *table._closing.values()]
    assert sum(map(len, being_put)) == len(reserved), "reservations without a put"
    assert table.leases or not (table._unlisted or len(evictable) != len(readable)), "readers without a lease"
    every = [*readable.values(), *reserved.values(), *table._lost]
    assert table._unlisted or sum(allocator.rounded(each.size) for each in every) == table.used_bytes
