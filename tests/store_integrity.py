"""Checks that the books of a store node's object table balance."""

from __future__ import annotations

from collections import Counter

from pinyon.store.allocator import OffsetAllocator
from pinyon.store.objects import ObjectTable


def check_allocator(allocator: OffsetAllocator) -> None:
    """Checks that taken ranges and holes tile the pool and that no two holes touch. O(n log n)."""
    end, was_hole = 0, False
    for offset, size, hole in sorted(
        [(*each, False) for each in allocator._taken.items()] + [(*each, True) for each in allocator.hole_at.items()]
    ):
        assert offset == end, f"a gap or an overlap at byte {offset}"
        assert size > 0
        assert not offset % allocator._alignment
        assert not (hole and was_hole), f"two holes touch at byte {offset}"
        end, was_hole = offset + size, hole
    assert end == allocator.capacity_bytes
    assert allocator.used_bytes == sum(allocator._taken.values())
    listed = {offset: size for size, offsets in allocator._holes.items() for offset in offsets}
    ends = {offset + size: offset for offset, size in allocator.hole_at.items()}
    assert (listed, ends) == (allocator.hole_at, allocator.hole_before)
    assert allocator._sizes == sorted(allocator._holes)


def check_table(table: ObjectTable, *, copying: bool = False) -> None:
    """Checks the table, with its allocator. Who is ``copying`` reads without leases. O(objects log objects)."""
    allocator, readable, reserved, eviction = table._allocator, table._readable, table._reserved, table.eviction
    check_allocator(allocator)
    evictable = [held for held in readable.values() if not held.readers and not held.demoting]
    assert not set(readable) & set(reserved), "a key is readable and reserved"
    assert all((held.key in eviction) != bool(held.readers or held.demoting) for held in readable.values())
    assert len(eviction) == len(evictable), "the eviction policy holds something else"
    sizes = Counter(allocator.rounded(held.size) for held in evictable)
    assert (sizes, sum(sizes.elements())) == (table._idle._sizes, table._idle.all_bytes)
    at = {held.offset: (held.key, held.offset + allocator.rounded(held.size)) for held in evictable}
    assert (at, {end: offset for offset, (_, end) in at.items()}) == (table._idle._at, table._idle._before)
    assert all(readable[held.key] is held and held.readers for held in table.pinned.values()), "a pinned object may go"
    assert (
        table.pinned_bytes
        == sum(allocator.rounded(held.size) for held in table.pinned.values())
        <= table.pinned_max_bytes
    )
    being_put = [*table._puts._leases.values(), *table._closing.values()]
    assert sum(map(len, being_put)) == len(reserved), "reservations without a put"
    if table.disk is None:  # which holds objects, too
        idle = len(readable) - sum(held.readers == 1 for held in table.pinned.values())  # but for their pins
        assert table.leases or copying or not (table._unlisted or len(evictable) != idle), "readers without a lease"
    every = [*readable.values(), *reserved.values(), *table._lost]
    assert table._unlisted or sum(allocator.rounded(each.size) for each in every) == table.used_bytes
    assert table.reserved_bytes == sum(allocator.rounded(each.size) for each in reserved.values())
    owners = {each.tenant for each in [*readable.values(), *reserved.values()]} if table.quotas._quotas else set()
    assert all(owner in table.quotas.accounts or table.quotas.limit(owner) is None for owner in owners)
    for tenant, account in table.quotas.accounts.items():
        idle = [each for each in readable.values() if each.tenant == tenant and not each.readers]
        assert {each.key: each for each in idle} == account, "a quota counts something else as idle"
        assert sum(allocator.rounded(each.size) for each in idle) == account.idle_bytes
        held = idle + [each for each in [*readable.values(), *reserved.values()] if each.tenant == tenant]
        assert (
            table._unlisted or sum(allocator.rounded(each.size) for each in held) - account.idle_bytes == account.held
        )
