"""A node's eviction policy hears what happens to each object: its request, its kind, its place in the prompt."""

from __future__ import annotations

import pytest

from pinyon.eviction import NO_TRAITS, Traits, Use
from pinyon.paging.leases import LeaseTable
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.objects import ObjectTable
from pinyon_lab.policies.eviction import Lfu
from tests.store_integrity import check_table
from tests.unit.eviction.told import Told

A, B, C, D, E, F = (bytes([number]) * 16 for number in range(6))
FILE = Traits("file/3", "anna")
CHAT = Traits("chat/1", "ben")


class ToldOfChains(Told):
    def __init__(self) -> None:
        super().__init__()
        self.chains: list[tuple[bytes, bytes]] = []

    def follows(self, key: bytes, after: bytes, now_s: float) -> None:
        self.chains.append((key, after))


def put(table: ObjectTable, keys: list[bytes], traits: Traits = NO_TRAITS, places: tuple[int, ...] = ()) -> None:
    put_id, _ = table.put_start(keys, 64, 0.0, 1.0, traits, places)
    if put_id:
        assert table.close_put(put_id)
        table.end_put(put_id, commit=True, now_s=0.0)


def make() -> tuple[Told, ObjectTable]:
    policy = Told()
    return policy, ObjectTable(OffsetAllocator(1 << 12, 64), policy, LeaseTable())


def test_the_events_of_objects():
    policy, table = make()
    put(table, [A, B], FILE, (7, 8))
    assert policy.take() == [("stored", [A, B], FILE, [7, 8], None)]
    put(table, [B, C], FILE, (2, 3))
    assert policy.take() == [
        *(("pinned", [B]), ("used", [B], FILE, [2]), ("unpinned", [B])),  # B must not make room for C
        ("stored", [C], FILE, [3], B),
    ]
    lease = table.acquire([A, B, C], 0.0, 1.0, use=Use(NO_TRAITS, 4))
    assert policy.take() == [("pinned", [A, B, C]), ("used", [A, B, C], NO_TRAITS, [4, 5, 6])]
    other = table.acquire([A], 0.0, 1.0)
    assert policy.take() == [("used", [A], None, [0])]
    table.remove([B])
    assert policy.take() == [("dropped", [B])]
    table.release(lease.lease_id, 0.0)
    assert policy.take() == [("unpinned", [C])]
    table.release(other.lease_id, 0.0)
    assert policy.take() == [("unpinned", [A])]
    check_table(table)


def test_what_comes_before_is_told_where_place_follows_place():
    policy, table = make()
    put(table, [A, B, C, D], FILE, (1, 2, 1, 2))  # of two prompts
    assert policy.take() == [("stored", [C, D], FILE, [1, 2], None), ("stored", [A, B], FILE, [1, 2], None)]
    table.remove([B, D])
    policy.take()
    put(table, [A, B, D], FILE, (1, 2, 4))
    assert [event for event in policy.take() if event[0] == "stored"] == [
        ("stored", [D], FILE, [4], None),
        ("stored", [B], FILE, [2], A),
    ]


def test_a_put_that_fails_says_nothing():
    policy, table = make()
    put_id, _ = table.put_start([A], 64, 0.0, 1.0, FILE)
    assert table.close_put(put_id)
    table.end_put(put_id, commit=False, now_s=0.0)
    assert policy.take() == []


def test_another_policy_takes_over():
    _, table = make()
    put(table, [A, B, C], FILE, (7, 8, 9))
    lease = table.acquire([A], 0.0, 1.0)
    table.switch(Lfu(), 1.0)
    told = Told()
    table.switch(told, 1.0)
    check_table(table)
    stored = [("stored", [B, C], FILE, [8, 9], None), ("stored", [A], FILE, [7], None)]
    assert told.take() == [*stored, ("pinned", [A])]
    table.release(lease.lease_id, 2.0)
    check_table(table)
    with pytest.raises(ValueError, match="another pool"):
        table.switch(told, 3.0)


def test_another_policy_is_told_of_chains():
    """Runs end where another prompt begins, or where other requests stored the blocks."""
    _, table = make()
    put(table, [A, B, C, D], FILE)
    put(table, [A, B, E], FILE)
    put(table, [A, B, E, F], CHAT)
    told = ToldOfChains()
    table.switch(told, 1.0)
    runs = [event for event in told.take() if event[0] == "stored"]
    assert runs == [
        ("stored", [C, D], FILE, [2, 3], None),
        ("stored", [E], CHAT, [2], None),
        ("stored", [A, B], CHAT, [0, 1], None),
        ("stored", [F], CHAT, [3], None),
    ]
    assert told.chains == [(C, B), (E, B), (F, E)]
