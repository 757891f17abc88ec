from __future__ import annotations

import pytest

from pinyon.core.errors import ResourceExhausted
from pinyon.eviction.lru import Lru
from pinyon.paging import BlockPool, LeaseTable, Reservations


def test_a_lease_ends_once_by_release_or_by_time() -> None:
    leases: LeaseTable[int] = LeaseTable(first_id=100)
    early, late = leases.grant([1, 2], now_s=0.0, duration_s=1.0), leases.grant([3], now_s=0.0, duration_s=2.0)
    assert (early, late, len(leases), leases.next_deadline()) == (100, 101, 2, 1.0)
    assert leases.overdue(0.999) == []
    assert leases.release(late) == [3]
    assert leases.release(late) is None
    assert leases.overdue(1.0) == [early]
    assert leases.overdue(9.0) == [], "it is named once"
    assert (len(leases), leases.next_deadline()) == (1, None)
    assert leases.release(early) == [1, 2]
    assert leases.release(early) is None
    assert (len(leases), leases.next_deadline()) == (0, None)


def test_leases_are_limited_and_their_book_keeping_too() -> None:
    leases: LeaseTable[int] = LeaseTable(max_leases=2)
    for _ in range(5000):
        assert leases.release(leases.grant([1], 0.0, 1e6)) == [1]
    assert len(leases._deadlines._heap) < 2000
    kept = [leases.grant([each], float(each), 1.0) for each in (1, 2)]
    with pytest.raises(ResourceExhausted):
        leases.grant([3], 0.0, 1.0)
    assert leases.overdue(2.5) == [kept[0]]
    for _ in range(2000):  # overdue leases are not named again when the books are rebuilt
        with pytest.raises(ResourceExhausted):
            leases.grant([3], 0.0, 1.0)
        leases.release(kept.pop())
        kept.append(leases.grant([2], 3.0, 1.0))
    assert leases.overdue(3.5) == []
    assert leases.release(kept[0]) == [1]
    assert leases.release(kept[1]) == [2]


def test_a_refused_lease_leaves_no_block_referenced() -> None:
    pool = BlockPool(2, Lru())
    reservations = Reservations(pool, LeaseTable(max_leases=1))
    room = reservations.reserve((), 2, 0.0)
    assert room
    keys = [bytes([number]) * 16 for number in (1, 2)]
    reservations.publish(room.table, keys, 0.0)
    reservations.release(room.table, 0.0)
    lease, _ = reservations.lease(keys[:1], 1.0, 0.0, allow_gaps=False)
    for _ in range(3):
        with pytest.raises(ResourceExhausted):
            reservations.lease(keys[1:], 1.0, 0.0, allow_gaps=False)
    assert pool.allocate(1, now_s=0.0) is not None, "the second block is free"
    assert pool.allocate(1, now_s=0.0) is None, "the first one is leased"
    assert reservations.end_lease(lease, 0.0)
    assert pool.allocate(1, now_s=0.0) is not None


def test_ids_start_above_zero() -> None:
    with pytest.raises(ValueError, match="lease ids"):
        LeaseTable(first_id=0)
