"""Pools of caches against a second, plain version with lists."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.eviction import EVICTION_POLICIES, NO_TRAITS, Lru, Traits
from pinyon_lab.caches.pool_replay import LOOK_AHEAD_MAX, NODES_MAX, POOLS, LastCopies, PoolSize, pool
from pinyon_lab.caches.replay import CacheRequest, replay, replayed
from tests.unit.eviction.test_eviction_replay import trace

LOCAL = ["round_robin", "cache_affinity", "cache_affinity:min_share=0.5"]
ROUTERS = [*LOCAL, "global", "coldest", "coldest:candidates=1", "coldest:candidates=3,seed=7,run_blocks=3,renew_s=2"]


def asked_for(requests: Sequence[Sequence[int]]) -> list[CacheRequest]:
    kinds = [NO_TRAITS, Traits("text/1", "anna"), Traits("text/2", "bert")]
    return [CacheRequest(blocks, number / 3, kinds[number % 3]) for number, blocks in enumerate(requests)]


class NaiveNode:
    """LRU by a list, the next block to evict first."""

    def __init__(self) -> None:
        self.order: list[int] = []
        self.last_s: dict[int, float] = {}

    def take(self, blocks: Sequence[int], now_s: float) -> None:
        for block in reversed(list(dict.fromkeys(blocks))):
            self.order = [each for each in self.order if each != block] + [block]
            self.last_s[block] = now_s


def leading(blocks: Sequence[int], held: Sequence[int]) -> int:
    return next((place for place, block in enumerate(blocks) if block not in held), len(blocks))


def naive_local(
    requests: Sequence[CacheRequest], nodes: int, capacity: int, router: str, look: int
) -> tuple[list[int], int]:
    """Returns the hits of each request, and the number of copies beyond the first."""
    pool = [NaiveNode() for _ in range(nodes)]
    load = [0] * nodes
    hits = []
    for number, (blocks, now_s, _) in enumerate(requests):
        found = [leading(blocks, node.order) for node in pool]
        if router == "round_robin":
            chosen = number % nodes
        else:
            least = 0.5 * len(blocks) if "min_share" in router else 0
            best = max(found) if max(found) >= least else -1
            chosen = min(
                (node for node in range(nodes) if best in (found[node], -1)), key=lambda node: (load[node], node)
            )
        load[chosen] += len(blocks)
        hits.append(found[chosen])
        node = pool[chosen]
        node.take(blocks, now_s)
        while len(node.order) > capacity:
            others = {block for other in pool if other is not node for block in other.order}
            victim = next((block for block in node.order[:look] if block in others), node.order[0])
            node.order.remove(victim)
    held = [block for node in pool for block in node.order]
    return hits, len(held) - len(set(held))


def naive_coldest(
    requests: Sequence[CacheRequest],
    nodes: int,
    capacity: int,
    candidates: int,
    seed: int,
    run: int,
    renew: int,
    read_first: bool,
) -> list[int]:
    pool = [NaiveNode() for _ in range(nodes)]
    rng = random.Random(seed)
    hits = []
    known = -1.0
    for blocks, now_s, _ in requests:
        held = [block for node in pool for block in node.order]
        hits.append(leading(blocks, held))
        if not renew or now_s // renew != known:
            known = now_s // max(1, renew)
            room = [capacity - len(node.order) for node in pool]
            heads = [node.last_s[node.order[0]] if node.order else float("-inf") for node in pool]
        read = list(dict.fromkeys(blocks[: hits[-1]])) if read_first else []
        for node in pool:
            node.take([block for block in read if block in node.order], now_s)
        new = [block for block in dict.fromkeys(blocks) if block not in held]
        parts: list[list[int]] = [[] for _ in pool]
        for number, block in enumerate(new):
            if number % run == 0:
                drawn = rng.sample(range(nodes), min(candidates, nodes))
                most = max(room[node] for node in drawn)
                ranks = [-room[node] if most > 0 else (heads[node], -room[node]) for node in drawn]
                chosen = drawn[ranks.index(min(ranks))]
            room[chosen] -= 0 if renew else 1
            parts[chosen].append(block)
        for node, part in zip(pool, parts, strict=True):
            again = [] if read_first else [block for block in blocks if block in node.order]
            node.take([block for block in dict.fromkeys(blocks) if block in part or block in again], now_s)
            del node.order[: max(0, len(node.order) - capacity)]
    return hits


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 1 << 20), st.integers(1, 5), st.integers(1, 25), st.sampled_from(LOCAL), st.sampled_from([0, 1, 4])
)
def test_local_caches_are_as_defined(seed: int, nodes: int, capacity: int, router: str, look: int) -> None:
    requests = asked_for(trace(seed, 60))
    cache, hits = replayed(requests, "lru", pool(router, PoolSize(nodes, capacity), look))
    expected, duplicates = naive_local(requests, nodes, capacity, router, look)
    result = cache.result()
    assert (hits, result["duplicate_blocks"]) == (expected, duplicates)
    assert result["pool_hit_blocks"] >= sum(hits)


@settings(deadline=None, max_examples=60)
@given(
    st.integers(0, 1 << 20),
    st.integers(1, 5),
    st.integers(1, 12),
    st.integers(1, 3),
    st.integers(1, 3),
    st.sampled_from([0, 1, 5]),
    st.booleans(),
)
def test_the_coldest_candidate_is_as_defined(
    seed: int, nodes: int, capacity: int, candidates: int, run: int, renew: int, read_first: bool
) -> None:
    requests = asked_for(trace(seed, 60))
    router = f"coldest:candidates={candidates},seed={seed},run_blocks={run},renew_s={renew},read_first={read_first}"
    _, hits = replayed(requests, "lru", pool(router.lower(), PoolSize(nodes, capacity)))
    assert hits == naive_coldest(requests, nodes, capacity, candidates, seed, run, renew, read_first)


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("policy", [*EVICTION_POLICIES.names, "belady"])
def test_one_node_is_the_plain_replay(policy: str, router: str) -> None:
    for seed in range(3):
        requests = asked_for(trace(seed))
        plain = replay(requests, policy, 15)
        for last_copies in (0, 4) if router in LOCAL else (0,):
            cache, hits = replayed(requests, policy, pool(router, PoolSize(1, 15), last_copies))
            assert (sum(hits), cache.result()["evicted_blocks"]) == (plain.hit_blocks, plain.evicted), f"seed {seed}"


@pytest.mark.parametrize("router", ROUTERS)
@pytest.mark.parametrize("policy", [*EVICTION_POLICIES.names, "belady"])
def test_no_node_holds_more_than_fits_and_figures_add_up(policy: str, router: str) -> None:
    requests = asked_for(trace(11))

    def once() -> tuple[dict[str, Any], list[int]]:
        cache, hits = replayed(requests, policy, pool(router, PoolSize(3, 9), 4 if router in LOCAL else 0))
        return cache.result(), hits

    result, hits = once()
    assert once() == (result, hits), "the same again"
    nodes = result["per_node"]
    assert all(node["resident_blocks"] <= 9 for node in nodes)
    assert result["resident_blocks"] == 27, "a full pool"
    if nodes:
        for name in ("resident_blocks", "evicted_blocks"):
            assert sum(node[name] for node in nodes) == result[name]
        assert sum(node["hit_blocks"] for node in nodes) == sum(hits)
    if router in LOCAL:
        assert sum(node["requests"] for node in nodes) == len(requests)
        assert sum(node["blocks"] for node in nodes) == sum(len(asked.blocks) for asked in requests)
    if router == "global":
        assert sum(hits) == replay(requests, policy, 27).hit_blocks


def test_other_seeds_draw_other_nodes() -> None:
    requests = asked_for(trace(5))
    ends = [
        replayed(requests, "lru", pool(f"coldest:seed={seed}", PoolSize(4, 6)))[0].result()["per_node"]
        for seed in range(4)
    ]
    assert any(end != ends[0] for end in ends)


def test_affinity_follows_the_longest_run_and_then_the_load() -> None:
    requests = [[1, 2], [3], [1, 2, 4], [3, 5], [6], [7, 8, 9]]
    cache, hits = replayed(asked_for(requests), "lru", pool("cache_affinity", PoolSize(3, 20)))
    assert hits == [0, 0, 2, 1, 0, 0]
    # 1, 2 -> node 0; 3 -> node 1 (no load, lower than 2); longer prefixes follow; 6 -> node 2; 7 -> node 2, the least
    assert [node["blocks"] for node in cache.result()["per_node"]] == [5, 3, 4]


def test_a_run_that_is_too_short_does_not_count() -> None:
    requests = [[1, 2], [1, 3, 4]]
    for router, expected in (("cache_affinity", [5, 0]), ("cache_affinity:min_share=0.5", [2, 3])):
        cache, hits = replayed(asked_for(requests), "lru", pool(router, PoolSize(2, 20)))
        assert [node["blocks"] for node in cache.result()["per_node"]] == expected
        assert hits == [0, 1 if expected[1] == 0 else 0]
        assert cache.result()["pool_hit_blocks"] == 1
        assert cache.result()["duplicate_blocks"] == (0 if expected[1] == 0 else 1)


def test_last_copies_are_passed_over_and_keep_their_order() -> None:
    copies = {3, 4}
    policy = LastCopies(Lru(), lambda key: key in copies, 3)
    policy.stored([6, 5, 4, 3, 2, 1], 0.0, NO_TRAITS, range(6))  # 1 is evicted first
    assert policy.victims(1, 1.0) == [3]
    policy.used([2], 1.0, NO_TRAITS, [0])
    assert policy.victims(3, 2.0) == [4, 1, 5], "2 was used meanwhile"
    assert policy.victims(9, 2.0) == [6, 2]


@pytest.mark.parametrize(
    ("router", "nodes", "capacity", "look", "said"),
    [
        ("round_robin", 0, 4, 0, "nodes must be from 1"),
        ("round_robin", NODES_MAX + 1, 4, 0, "nodes must be from 1"),
        ("round_robin", 2, 0, 0, "capacity must be positive"),
        ("round_robin", 2, 4, LOOK_AHEAD_MAX + 1, "among at most"),
        ("global", 2, 4, 1, "each block exists once"),
        ("coldest:candidates=0", 2, 4, 0, "candidates must be from 1"),
        ("cache_affinity:min_share=2", 2, 4, 0, "min_share must be from 0"),
        ("nonsense", 2, 4, 0, "known: cache_affinity, round_robin"),
    ],
)
def test_nonsense_is_refused(router: str, nodes: int, capacity: int, look: int, said: str) -> None:
    with pytest.raises(ValueError, match=said):
        pool(router, PoolSize(nodes, capacity), look)


def test_every_kind_is_tested_here() -> None:
    assert {router.partition(":")[0] for router in ROUTERS} == set(POOLS.names)
