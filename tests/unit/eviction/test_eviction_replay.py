"""The replay of a cache against a second, plain version with lists."""

from __future__ import annotations

import random
from collections.abc import Sequence

import pytest

from pinyon.eviction import EVICTION_POLICIES, NO_TRAITS, Lru
from pinyon.eviction.fit import Fit
from pinyon_lab.caches.pool_replay import PoolSize, pool
from pinyon_lab.caches.replay import CacheReplay, CacheRequest, replay


def trace(seed: int, requests: int = 120) -> list[list[int]]:
    """Returns chains that branch, so that ids stand for prefixes, with some other ids and some that come twice."""
    random_ = random.Random(seed)
    chains: list[list[int]] = [[]]
    made: list[list[int]] = []
    fresh = 0
    for _ in range(requests):
        begin = random_.choice(chains)
        begin = begin[: random_.randint(0, len(begin))]
        more = random_.randint(0 if begin else 1, 4)
        chain = [*begin, *range(fresh, fresh + more)]
        fresh += more
        chains.append(chain)
        if random_.random() < 0.1:
            chain = random_.choices(range(fresh), k=random_.randint(1, 5))
        made.append(chain)
    return made


def naive(requests: Sequence[Sequence[int]], policy: str, capacity: int) -> list[int]:
    """Returns the hits of each request; lru, fifo, lfu and belady search all resident blocks."""
    resident: dict[int, dict[str, float]] = {}
    hits = []
    for number, blocks in enumerate(requests):
        count = 0
        while count < len(blocks) and blocks[count] in resident:
            count += 1
        hits.append(count)
        for place, block in reversed(list(enumerate(blocks))):
            place = min(at for at, other in enumerate(blocks) if other == block)
            later = (at for at in range(number + 1, len(requests)) if block in requests[at])
            entry = resident.setdefault(block, {"came": number, "came_place": place, "uses": 0, "last": -1})
            if entry["last"] != number:
                entry["uses"] += 1
            entry |= {"last": number, "place": place, "next": next(later, float("inf"))}
        while len(resident) > capacity:
            ranks = {
                "lru": lambda e: (e["last"], -e["place"]),
                "fifo": lambda e: (e["came"], -e["came_place"]),
                "lfu": lambda e: (e["uses"], -e["place"], e["last"]),
                "belady": lambda e: (-e["next"], -e["place"]),
            }
            del resident[min(resident, key=lambda block: (*ranks[policy](resident[block]), block))]
    return hits


@pytest.mark.parametrize("policy", ["lru", "fifo", "lfu", "belady"])
@pytest.mark.parametrize("capacity", [1, 5, 20, 60])
def test_hits_are_those_of_the_definition(policy: str, capacity: int) -> None:
    for seed in range(12):
        requests = trace(seed)
        asked = [CacheRequest(blocks, float(number // 3), NO_TRAITS) for number, blocks in enumerate(requests)]
        expected = naive(requests, policy, capacity)
        cache = replay(asked, policy, capacity)
        assert cache.hit_blocks == sum(expected), f"seed {seed}"
        assert cache.blocks == sum(map(len, requests))
        assert len(cache.resident) <= capacity


@pytest.mark.parametrize("policy", [*EVICTION_POLICIES.names, "belady"])
def test_nothing_is_lost_and_nothing_invented(policy: str) -> None:
    for seed in range(5):
        requests = trace(seed)
        asked = [CacheRequest(blocks, float(number), NO_TRAITS) for number, blocks in enumerate(requests)]
        unique = len({block for blocks in requests for block in blocks})
        endless = replay(asked, policy, unique)
        assert (endless.evicted, len(endless.resident)) == (0, unique)
        small = replay(asked, policy, 10)
        assert 0 <= small.hit_blocks <= endless.hit_blocks
        assert len(small.resident) == 10


def test_a_request_larger_than_the_cache_keeps_its_head() -> None:
    cache = CacheReplay(Lru(), 3)
    assert cache.request([1, 2, 3, 4, 5], 0.0, NO_TRAITS) == 0
    assert cache.resident == {1, 2, 3}
    assert cache.request([1, 2, 3, 4, 5], 0.0, NO_TRAITS) == 3


def test_what_is_behind_a_gap_is_used_and_no_hit() -> None:
    cache = CacheReplay(Lru(), 4)
    for blocks in ([7], [1, 2], [8]):
        cache.request(blocks, 0.0, NO_TRAITS)
    assert cache.request([9, 1], 1.0, NO_TRAITS) == 0
    assert len(cache.resident) == 4
    assert 7 not in cache.resident, "it was used before all others"
    assert cache.request([5], 2.0, NO_TRAITS) == 0
    assert (1 in cache.resident, 2 in cache.resident) == (True, False)


def test_a_capacity_must_be_positive() -> None:
    with pytest.raises(ValueError, match="capacity"):
        CacheReplay(Lru(), 0)


class Pupil(Lru[int]):
    """An LRU policy that keeps the times at which it could have learned."""

    def __init__(self) -> None:
        super().__init__()
        self.asked_s: list[float] = []

    def refit(self, now_s: float) -> None:
        self.asked_s.append(now_s)

    def adopt(self, fit: object) -> None:
        raise AssertionError("it had nothing to learn")

    def beliefs(self) -> dict[str, Fit]:
        return {}


@pytest.mark.parametrize("router", ["", "global", "cache_affinity", "coldest"])
def test_policies_learn_where_something_is_evicted(router: str) -> None:
    """A policy whose first fit came with the first request would know nothing until the next one, as in services."""
    pupil = Pupil()
    cache = pool(router, PoolSize(1, 4), 0)(lambda: pupil) if router else CacheReplay(pupil, 4)
    for number, blocks in enumerate(([1, 2], [3, 4], [1, 2], [5], [5], [6, 7])):
        cache.request(blocks, float(number), NO_TRAITS)
    assert pupil.asked_s == [3.0, 5.0]
