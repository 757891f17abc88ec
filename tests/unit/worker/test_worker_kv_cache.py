"""The order in which requests get blocks, and the return of all blocks."""

from __future__ import annotations

import asyncio

import pytest

from pinyon.batching import BatchRequest
from pinyon.core.layout import KvLayout
from pinyon.transfer import Access, TransferLimitReached
from services.worker.kv.cache import KvCache
from tests.unit.worker.caches import FakeDoors, Holder, new_cache
from tests.worker_integrity import check_admission

LAYOUT = KvLayout(layers=1, kv_heads=1, head_dim=1, block_tokens=4)
KEYS = [bytes([number]) * 16 for number in range(8)]


@pytest.fixture
def now():
    return [100.0]


@pytest.fixture
async def doors():
    return FakeDoors()


@pytest.fixture
async def cache(now, doors):
    cache = new_cache(LAYOUT, 6, lambda: now[0], doors)
    yield cache
    await cache.close()
    check_admission(cache.admission)
    assert cache.pool.used == 0
    assert not doors.open


def published(cache: KvCache, blocks: int) -> Holder:
    """Returns a request whose blocks have the first keys."""
    holder = Holder(cache, [], blocks)
    cache.publish(holder.table, KEYS[:blocks])
    return holder


async def test_a_reservation_brings_what_is_held_of_the_prefix(cache):
    first = Holder(cache, [], 3)
    cache.publish(first.table[:2], KEYS[:2])
    second = Holder(cache, KEYS[:4], 4)
    assert second.reservation.held == 2
    assert second.table[:2] == first.table[:2]
    assert not set(second.table[2:]) & set(first.table)
    first.end()
    second.end()
    assert cache.pool.cached == 2


async def test_no_reservation_overtakes_one_waiting_for_later_ones(cache):
    first, second = Holder(cache, [], 3), Holder(cache, [], 2)
    large, small = Holder(cache, [], 4), Holder(cache, [], 1)
    assert large.waits
    assert not small.waits, "what came before the large one takes too much anyway"
    first.end()
    last = Holder(cache, [], 1)
    assert [large.waits, last.waits] == [True, True]
    assert cache.admission.waiting == 2
    small.end()
    assert [large.waits, last.waits] == [False, True]
    for each in (second, large, last):
        each.end()


async def test_whoever_gives_up_lets_the_next_one_through(cache):
    first, second = Holder(cache, [], 3), Holder(cache, [], 2)
    large, small = Holder(cache, [], 4), Holder(cache, [], 1)
    first.end()
    last = Holder(cache, [], 1)
    large.withdraw()
    assert not last.waits
    assert cache.admission.waiting == 0
    for each in (second, small, last):
        each.end()


async def test_running_requests_grow_first_and_take_back_spare_blocks(cache):
    running = Holder(cache, [], 4)
    waiting = Holder(cache, [], 3)
    spare = cache.grow(running.number, 2)
    given = []

    def give_back():
        while spare:
            given.append(spare.pop())
            cache.release(given[-1:])
            yield

    cache.spare = give_back
    grown = cache.grow(running.number, 1)
    assert grown == given, "no more than was wanted"
    assert waiting.waits
    cache.release(grown)
    assert waiting.waits
    running.end()
    waiting.end()
    cache.spare = None
    cache.release(spare)


async def test_preempted_requests_ask_together_and_the_oldest_is_first(cache):
    old, young, last = (Holder(cache, [], 2) for _ in range(3))
    for each in (young, old):
        cache.give_way(each.number, each.table)
    for each, blocks in ((young, 3), (old, 2)):  # the younger request gave way first, and asks first
        each.future = cache.reserve(BatchRequest(each.number, 1, blocks), at_once=False)
    assert old.waits
    assert young.waits
    cache.settle()
    assert not old.waits
    assert young.waits
    for each in (last, old, young):
        each.end()


async def test_how_long_a_newcomer_waits_is_told_by_those_that_wait(cache, now):
    waits = []
    cache.on_admitted = lambda seconds, _: waits.append(seconds)
    running = Holder(cache, [], 6)
    assert cache.room_wait_s() == 0
    first = Holder(cache, [], 6)
    first_s = now[0]
    now[0] += 4
    assert cache.room_wait_s() == pytest.approx(4)
    running.end()
    assert cache.room_wait_s() == 0
    second = Holder(cache, [], 1)
    assert cache.room_wait_s() == pytest.approx(4), "the one before it waited so long"
    first.end()
    second.end()
    assert waits == [0, 4, 0]
    assert now[0] == first_s + 4


async def test_what_became_readable_since_replaces_empty_blocks(cache):
    mine = Holder(cache, KEYS, 2)
    other = Holder(cache, KEYS, 2)
    cache.publish(other.table, KEYS[:2])
    cache.extend(mine.reservation, KEYS[:2])
    assert (mine.table, mine.reservation.held) == (other.table, 2)
    assert cache.pool.free == 4
    mine.end()
    other.end()


async def test_a_lease_keeps_blocks_until_its_time_and_then_makes_room(cache, now):
    held = published(cache, 6)
    lease, found, _ = cache.lease([KEYS[0], KEYS[1], KEYS[7], KEYS[2]], 1.0, allow_gaps=False)
    assert lease > 0
    assert [index for index, _ in found] == [0, 1]
    held.end()
    waiting = Holder(cache, [], 6)
    assert waiting.waits
    now[0] += 0.5
    cache._expire()
    assert waiting.waits
    now[0] += 0.6
    cache._expire()
    waiting.end()
    assert not cache.end_lease(lease)
    assert cache.pool.eviction.evicted == 6


async def test_a_short_lease_ends_in_time_behind_a_longer_one(cache, now):
    held = published(cache, 6)
    long, *_ = cache.lease(KEYS[:3], 1000.0, allow_gaps=False)
    cache.lease(KEYS[3:6], 0.5, allow_gaps=True)
    held.end()
    waiting = Holder(cache, [], 3)
    assert waiting.waits
    now[0] += 0.5
    async with asyncio.timeout(60):
        await waiting.future
        waiting.end()
    assert cache.leases == 1
    assert cache.end_lease(long)


async def test_nothing_held_is_no_lease(cache):
    assert cache.lease(KEYS, 1.0, allow_gaps=True) == (0, [], None)
    assert cache.leases == 0


async def test_a_lease_ends_early(cache):
    held = published(cache, 2)
    lease, _, _ = cache.lease(KEYS[:2], 1.0, allow_gaps=False)
    assert cache.end_lease(lease)
    assert not cache.end_lease(lease)
    held.end()


async def test_a_leases_key_opens_its_blocks_alone_and_until_its_end(cache, doors):
    held = Holder(cache, [], 4)
    cache.publish(held.table[1:3], KEYS[:2])
    lease, found, opened = cache.lease(KEYS[:2], 1.5, allow_gaps=False)
    (grant,) = doors.open.values()
    size = LAYOUT.block_bytes
    assert grant.ranges == tuple((block * size, size) for _, block in found)
    assert (grant.access, grant.lifetime_s, opened) == (Access.READ, 1.5, grant.descriptor())
    assert cache.end_lease(lease)
    assert not doors.open
    held.end()


@pytest.mark.parametrize("by_time", [False, True])
async def test_blocks_are_not_used_again_while_they_are_being_read(cache, doors, now, by_time):
    held = published(cache, 6)
    lease, *_ = cache.lease(KEYS[:2], 1.0, allow_gaps=False)
    held.end()
    doors.idle.clear()
    if by_time:
        now[0] += 1.0
        cache._expire()
    else:
        assert cache.end_lease(lease)
    assert not doors.open, "the key is refused at once"
    assert not cache.end_lease(lease)
    waiting = Holder(cache, [], 6)
    await asyncio.sleep(0)
    assert waiting.waits
    doors.idle.set()
    await asyncio.wait_for(waiting.future, 60)
    waiting.end()


async def test_a_lease_without_a_key_is_no_lease(cache, doors):
    held = published(cache, 2)
    doors.full = True
    with pytest.raises(TransferLimitReached):
        cache.lease(KEYS[:2], 1.0, allow_gaps=False)
    assert cache.leases == 0
    held.end()


async def test_the_timer_ends_leases_by_itself():
    cache = new_cache(LAYOUT, 2, asyncio.get_running_loop().time)
    held = published(cache, 2)
    cache.lease(KEYS[:2], 0.01, allow_gaps=False)
    held.end()
    waiting = Holder(cache, [], 2)
    await asyncio.wait_for(waiting.future, 60)
    waiting.end()
    await cache.close()


async def test_withdrawing_does_not_look_through_those_that_wait(cache):
    held = Holder(cache, [], 6)
    waiting = [Holder(cache, [], 1) for _ in range(100)]

    class Unsearchable(dict):
        def items(self):
            raise AssertionError("all that wait were looked through")

    cache._waiting = Unsearchable(cache._waiting)
    for each in reversed(waiting):
        each.withdraw()
    assert cache.admission.waiting == 0
    held.end()
