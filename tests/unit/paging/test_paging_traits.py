"""An eviction policy is told what happens to each block's key: for whom, of what kind, and where in its prompt."""

from __future__ import annotations

import pytest

from pinyon.core.request import RequestClass
from pinyon.eviction import NO_TRAITS, Lfu, Lru, Traits, Use
from pinyon.paging import BlockPool, LeaseTable, Reservations
from tests.unit.eviction.told import Told

KEYS = [bytes([number]) * 16 for number in range(4)]
CHAT = Traits.of(RequestClass(kind="chat", turn=2, tenant="anna"))


def test_what_a_request_says() -> None:
    assert Traits("chat/2", "anna") == CHAT
    assert Traits.of(RequestClass()) == NO_TRAITS
    assert Use.of(RequestClass(), 3) == Use(None, 3), "of what is not known nothing is renewed"
    assert Use.of(RequestClass(kind="chat", turn=2, tenant="anna")) == Use(CHAT)


def test_the_events_of_a_prompt() -> None:
    policy = Told()
    pool = BlockPool(4, policy)
    reservations = Reservations(pool, LeaseTable())
    room = reservations.reserve((), 4, 0.0)
    assert room
    reservations.publish(room.table[1:3], KEYS[1:3], 0.5, CHAT, 1)
    reservations.publish(room.table[3:], KEYS[3:], 0.5)
    assert policy.take() == [
        ("stored", KEYS[1:3], CHAT, [1, 2]),
        ("pinned", KEYS[1:3]),
        ("stored", KEYS[3:], NO_TRAITS, [0]),
        ("pinned", KEYS[3:]),
    ]
    reservations.release(room.table, 1.0)
    assert policy.take() == [("unpinned", KEYS[1:])]
    again = reservations.reserve(KEYS[1:3], 2, 2.0, CHAT)
    assert again
    assert policy.take() == [("pinned", KEYS[1:3]), ("used", KEYS[1:3], CHAT, [0, 1])]
    lease, held = reservations.lease(KEYS, 9.0, 2.0, True, Use(NO_TRAITS, 4))
    assert [index for index, _ in held] == [1, 2, 3]
    assert policy.take() == [("pinned", KEYS[3:]), ("used", KEYS[1:], NO_TRAITS, [5, 6, 7])]
    reservations.release(again.table, 3.0)
    assert policy.take() == []
    assert reservations.end_lease(lease, 3.0)
    assert policy.take() == [("unpinned", KEYS[1:])]
    blocks = reservations.hold(KEYS[:2], 4.0)
    assert policy.take() == [("pinned", KEYS[1:2])], "to hold something is no use"
    pool.remove(KEYS[1])
    pool.remove(KEYS[2])
    assert policy.take() == [("dropped", KEYS[1:2]), ("dropped", KEYS[2:3])]
    reservations.release([block for _, block in blocks], 5.0)
    assert policy.take() == []
    pool.check_integrity()


def test_another_policy_takes_over() -> None:
    """It is told of what is held in the order in which it would have gone, and of what is in use."""
    pool = BlockPool(4, Lru())
    reservations = Reservations(pool, LeaseTable())
    room = reservations.reserve((), 4, 0.0)
    assert room
    reservations.publish(room.table, KEYS, 0.0, CHAT)
    reservations.release(room.table[:3], 1.0)
    reservations.release(reservations.reserve(KEYS[:1], 1, 2.0).table, 2.0)  # type: ignore[union-attr]
    policy = Told()
    pool.switch(policy, 3.0)
    pool.check_integrity()
    order = [2, 1, 0, 3]
    expected = [("stored", [KEYS[at]], CHAT, [at]) for at in order]
    assert policy.take() == [*expected, ("pinned", KEYS[3:])]
    assert set(pool.keys()) == set(KEYS)
    reservations.release(room.table[3:], 4.0)
    assert pool.allocate(2) is not None
    assert set(pool.keys()) == {KEYS[0], KEYS[3]}
    pool.check_integrity()
    with pytest.raises(ValueError, match="another pool"):
        pool.switch(policy, 5.0)
    pool.switch(Lfu(), 5.0)
    pool.check_integrity()
    assert pool.allocate(2) is not None
    assert pool.keys() == []
