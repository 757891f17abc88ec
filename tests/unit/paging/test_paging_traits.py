"""An eviction policy hears what happens to each block's key: its request, its kind, its place in the prompt."""

from __future__ import annotations

import pytest

from pinyon.core.request import RequestClass
from pinyon.eviction import EVICTION_POLICIES, NO_TRAITS, Lru, Traits, Use
from pinyon.paging import BlockPool, LeaseTable, Reservations, SecondTier
from pinyon_lab.policies.eviction import Lfu
from tests.unit.eviction.told import Told
from tests.worker_integrity import check_pool

KEYS = [bytes([number]) * 16 for number in range(4)]
CHAT = Traits.of(RequestClass(kind="chat", turn=2, tenant="anna"))
FILE = Traits("file/1", "ben")


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
        ("stored", KEYS[1:3], CHAT, [1, 2], None),
        ("pinned", KEYS[1:3]),
        ("stored", KEYS[3:], NO_TRAITS, [0], None),
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
    check_pool(pool)


def test_what_comes_before_is_told() -> None:
    """The policy hears chunk by chunk, behind a prefix that was there, and around a block of a faster request."""
    policy = Told()
    pool = BlockPool(12, policy)
    reservations = Reservations(pool, LeaseTable())
    first = reservations.reserve((), 2, 0.0)
    assert first
    reservations.publish(first.table[:1], KEYS[:1], 0.0)
    reservations.publish(first.table[1:], KEYS[1:2], 0.0, first=1, after=KEYS[0])
    second, third = (reservations.reserve(KEYS, 4, 1.0) for _ in range(2))
    assert second
    assert third
    assert second.held == third.held == 2
    policy.take()
    reservations.publish(second.table[2:3], KEYS[2:3], 1.0, first=2, after=KEYS[1])
    assert reservations.publish(third.table[2:], KEYS[2:], 2.0, first=2, after=KEYS[1]) == [(0, second.table[2])]
    assert [event for event in policy.take() if event[0] == "stored"] == [
        ("stored", KEYS[2:3], NO_TRAITS, [2], KEYS[1]),
        ("stored", KEYS[3:], NO_TRAITS, [3], KEYS[2]),
    ]
    more = [bytes([number]) * 16 for number in range(4, 7)]
    between = reservations.reserve((), 4, 3.0)
    assert between
    reservations.publish(between.table[:1], more[1:2], 3.0, first=5)
    policy.take()
    reservations.publish(between.table[1:], more, 4.0, first=4, after=KEYS[3])
    assert (
        [event for event in policy.take() if event[0] == "stored"]
        == [
            ("stored", more[2:], NO_TRAITS, [6], more[1]),  # the deepest first, as in one call
            ("stored", more[:1], NO_TRAITS, [4], KEYS[3]),
        ]
    )
    check_pool(pool)


def test_both_tiers_are_told_what_comes_before() -> None:
    policy, of_both = Told(), Told()
    pool = BlockPool(4, policy, SecondTier(8, of_both))
    reservations = Reservations(pool, LeaseTable())
    for keys in (KEYS, [b"other" + key for key in KEYS]):
        room = reservations.reserve((), 4, 0.0)
        assert room
        reservations.publish(room.table[:2], keys[:2], 0.0, CHAT)
        reservations.publish(room.table[2:], keys[2:], 0.0, CHAT, 2, keys[1])
        reservations.release(room.table, 0.0)
    stored = [("stored", keys[:2], CHAT, [0, 1], None), ("stored", keys[2:], CHAT, [2, 3], keys[1])]
    assert [event for event in of_both.take() if event[0] == "stored"][2:] == stored
    assert [event for event in policy.take() if event[0] == "stored"][2:] == stored
    assert reservations.reserve(KEYS, 4, 1.0, CHAT) is not None
    events = policy.take()
    assert events == [("stored", KEYS, CHAT, [0, 1, 2, 3], None), ("pinned", KEYS)], "they come up as one run"
    assert [event[0] for event in of_both.take()] == ["pinned", "used"], "to both tiers that is no news"


def test_what_comes_up_is_the_last_requests() -> None:
    """The pool's policy hears that the block is stored for that request, without a use: the block was there before."""
    policy = Told()
    pool = BlockPool(4, policy, SecondTier(8, Told()))
    reservations = Reservations(pool, LeaseTable())
    for keys, count in ((KEYS, 4), ([b"other" + key for key in KEYS], 2)):
        room = reservations.reserve((), count, 0.0)
        assert room
        reservations.publish(room.table, keys[:count], 0.0, CHAT)
        reservations.release(room.table, 0.0)
    up = {key for key in KEYS if key in (pool.below or ())}
    assert 0 < len(up) < 4
    policy.take()
    assert reservations.reserve(KEYS, 4, 1.0, FILE) is not None
    events = policy.take()
    stored = [key for event in events if event[0] == "stored" for key in event[1]]
    used = [key for event in events if event[0] == "used" for key in event[1]]
    assert (set(stored), set(used)) == (up, set(KEYS) - up)
    assert all(event[2] == FILE for event in events if event[0] in {"stored", "used"})
    after = Told()
    pool.switch(after, 2.0, Told())
    assert all(event[2] == FILE for event in after.take() if event[0] == "stored" and event[1][0] in KEYS)


def test_a_policy_that_takes_over_knows_what_extends_what() -> None:
    """The blocks belong to two requests, the second of which extends the first."""
    pool = BlockPool(8, Lru())
    reservations = Reservations(pool, LeaseTable())
    for first, after in ((0, None), (2, KEYS[1])):
        keys = KEYS[: first + 2]
        room = reservations.reserve(keys, len(keys), float(first))
        assert room
        reservations.publish(room.table[first:], keys[first:], float(first), CHAT, first, after)
        reservations.release(room.table, float(first))
    own = EVICTION_POLICIES.make("reuse_hazard")
    pool.switch(own, 5.0)
    assert own.victims(4, 6.0) == KEYS[::-1]


def test_another_policy_takes_over() -> None:
    """The new policy is told of held blocks in the order in which they would have gone, and of blocks in use."""
    pool = BlockPool(4, Lru())
    reservations = Reservations(pool, LeaseTable())
    room = reservations.reserve((), 4, 0.0)
    assert room
    reservations.publish(room.table, KEYS, 0.0, CHAT)
    reservations.release(room.table[:3], 1.0)
    reservations.release(reservations.reserve(KEYS[:1], 1, 2.0).table, 2.0)  # type: ignore[union-attr]
    policy = Told()
    pool.switch(policy, 3.0)
    check_pool(pool)
    expected = [("stored", KEYS[:3], CHAT, [0, 1, 2], None), ("stored", KEYS[3:], CHAT, [3], None)]
    assert policy.take() == [*expected, ("pinned", KEYS[3:])]
    assert set(pool.keys()) == set(KEYS)
    reservations.release(room.table[3:], 4.0)
    assert pool.allocate(2) is not None
    assert set(pool.keys()) == {KEYS[0], KEYS[3]}
    check_pool(pool)
    with pytest.raises(ValueError, match="another pool"):
        pool.switch(policy, 5.0)
    pool.switch(Lfu(), 5.0)
    check_pool(pool)
    assert pool.allocate(2) is not None
    assert pool.keys() == []
