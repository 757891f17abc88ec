"""The guard of pinyon's own policy: it knows what LRU would hold, and evicts nothing else while it is on."""

from __future__ import annotations

import math
from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.eviction import Traits
from pinyon.eviction.lru import Lru
from pinyon.eviction.lru_guard import HOLD, LIMIT_MAX, LruGuard
from pinyon.eviction.reuse_hazard import ReuseHazard, ReuseHazardSettings
from pinyon_lab.caches.replay import CacheReplay, CacheRequest, replayed
from tests.long import usually
from tests.property.test_eviction_reuse_hazard import Prompts


def guarded(**values: float) -> tuple[ReuseHazard[int], LruGuard[int]]:
    policy: ReuseHazard[int] = ReuseHazard(ReuseHazardSettings(**values))  # type: ignore[arg-type]
    assert policy._guard is not None
    return policy, policy._guard


def prompts(rng: Random, count: int) -> list[CacheRequest]:
    """Returns chains that share prefixes, at times of any distance."""
    made, now_s = Prompts(rng), 0.0
    asked: list[CacheRequest] = []
    for _ in range(count):
        now_s += rng.choice((0.0, 0.2, 5.0, 40.0))
        blocks, traits = made.next()
        asked.append(CacheRequest(blocks, now_s, traits))
    return asked


@settings(max_examples=usually(8, long=15), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(8, 60), st.booleans())
def test_it_knows_what_lru_would_hold(seed: int, capacity: int, fair: bool) -> None:
    """The guard's knowledge equals an LRU policy in a cache of its own."""
    policy, guard = guarded(refit_s=1.0, fair=fair)
    cache, lru = CacheReplay(policy, capacity), CacheReplay(Lru(), capacity)
    for each in prompts(Random(seed), 120):
        cache.request(*each)
        lru.request(*each)
        kept = list(guard._kept)
        assert set(kept[-capacity:]) == lru.resident
        held = cache.resident
        assert set(guard._group_of) == held - set(kept)
        assert {key: group for group, keys in guard._beyond.items() for key in keys} == guard._group_of
        assert len(guard) <= 3 * capacity


@settings(max_examples=usually(8, long=15), deadline=None)
@given(st.integers(0, 1 << 32), st.integers(8, 60))
def test_while_it_is_on_nothing_goes_that_lru_would_have_kept(seed: int, capacity: int) -> None:
    policy, guard = guarded(refit_s=1.0, fair=False)
    cache, lru = CacheReplay(policy, capacity), CacheReplay(Lru(), capacity)
    asked = prompts(Random(seed), 160)
    for each in asked[:80]:
        cache.request(*each)
        lru.request(*each)
    guard._hold = 1 << 30
    guard._turn(True)
    for each in asked[80:]:
        both = cache.resident & lru.resident
        cache.request(*each)
        lru.request(*each)
        assert both & lru.resident <= cache.resident


def turned_over(rng: Random) -> list[CacheRequest]:
    """Returns requests of two kinds: one comes back within a minute, one never. In the middle they swap their names."""
    asked: list[CacheRequest] = []
    count = usually(2_400, long=4_000)
    for number in range(count):
        at_s = number * 1.0
        blocks = [10 * number + more for more in range(8)]
        kind = rng.random() < 0.5
        asked.append(CacheRequest(blocks, at_s, Traits(f"{'ab'[kind]}/1", "t")))
        if kind == (number < count // 2):
            asked.append(CacheRequest(blocks, at_s + rng.uniform(1.0, 60.0), Traits(f"{'ab'[kind]}/1", "t")))
    return sorted(asked, key=lambda each: each.now_s)


def test_it_bounds_what_a_wrong_belief_costs() -> None:
    capacity = 400
    asked = turned_over(Random(7))
    middle = next(number for number, each in enumerate(asked) if each.now_s >= usually(2_400, long=4_000) // 2)
    hits = {}
    for choice in ("lru", "reuse_hazard:window_s=1e6", "reuse_hazard:window_s=1e6,guard=false"):
        _, each = replayed(asked, choice, lambda make: CacheReplay(make(), capacity))
        hits[choice] = sum(each[middle:])
    print(hits)
    lru, with_it, without = hits.values()
    keys = sum(len(each.blocks) for each in asked[middle:])
    debt = LIMIT_MAX * capacity  # before, more was gained than that
    tries = 1 + math.log2(1 + keys / (HOLD * debt))  # each is followed by twice the pause
    assert lru - with_it < tries * debt < lru - without


def test_a_block_that_changed_tenants_is_not_evicted_as_before() -> None:
    """LRU lost the block as the flooding tenant's; now it belongs to the quiet tenant, which is below its share."""
    policy, guard = guarded()
    policy.stored(range(10), 0.0, Traits("a/1", "flood"), range(10))
    policy.stored(range(100, 140), 1.0, Traits("a/1", "flood"), range(40))
    guard.shrink(40, policy._group_of)
    policy.used([5], 2.0, Traits("a/1", "quiet"), [5])
    policy.stored(range(200, 400), 3.0, Traits("a/1", "flood"), range(200))
    guard._hold = 1 << 30
    guard._turn(True)
    gone = policy.victims(100, 4.0)
    assert len(set(gone)) == 100
    assert not any(key in policy for key in gone)
    assert all(key in policy for key in range(6))
    policy.used(range(6), 5.0, Traits("a/1", "quiet"), range(6))
