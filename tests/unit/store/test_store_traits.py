"""The eviction policy is told whose objects it orders, and of what kind."""

from __future__ import annotations

from collections.abc import Callable, Iterable

from pinyon.core.request import RequestClass
from pinyon.eviction import Lru
from pinyon.eviction.policy import NO_TRAITS, Traits, no_traits
from pinyon.paging.leases import LeaseTable
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.objects import ObjectTable

A, B, C = (bytes([number]) * 16 for number in range(3))
FILE = Traits.of(RequestClass(kind="file", turn=3, tenant="anna"))


class Noting(Lru[bytes]):
    """LRU that keeps what it was told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[tuple[bytes, Traits]] = []

    def insert(
        self, items: Iterable[bytes], now_s: float = 0.0, traits_of: Callable[[bytes], Traits] = no_traits
    ) -> None:
        known = list(items)
        self.told += [(item, traits_of(item)) for item in known]
        super().insert(known, now_s, traits_of)


def put(table: ObjectTable, keys: list[bytes], traits: Traits = NO_TRAITS) -> None:
    put_id, _ = table.put_start(keys, 64, 0.0, 1.0, traits)
    assert table.close_put(put_id)
    table.end_put(put_id, commit=True, now_s=0.0)


def test_what_a_request_says_of_its_blocks():
    assert Traits("file/3", 0, "anna") == FILE
    assert Traits.of(RequestClass()) == NO_TRAITS


def test_traits_stay_with_their_object():
    policy = Noting()
    table = ObjectTable(OffsetAllocator(1 << 12, 64), policy, LeaseTable())
    put(table, [A, B], FILE)
    put(table, [C])
    assert policy.told == [(B, FILE), (A, FILE), (C, NO_TRAITS)]
    policy.told.clear()
    lease = table.acquire([A, B, C], 0.0, 1.0)
    assert not policy.told
    table.release(lease.lease_id, 0.0)
    assert policy.told == [(C, NO_TRAITS), (B, FILE), (A, FILE)]
    table.check_integrity()
