"""LRU's hits at all capacities at once, against one replay for each capacity."""

from __future__ import annotations

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.eviction import NO_TRAITS
from pinyon_lab.caches.lru_curve import LruCurve, _count_at_least
from pinyon_lab.caches.replay import CacheRequest, replay
from tests.unit.eviction.test_eviction_replay import trace


@settings(deadline=None, max_examples=25)
@given(st.integers(0, 1 << 20))
def test_every_capacity_has_the_hits_of_its_replay(seed: int) -> None:
    requests = trace(seed, 80)
    curve = LruCurve(requests)
    asked = [CacheRequest(blocks, 0.0, NO_TRAITS) for blocks in requests]
    unique = len({block for blocks in requests for block in blocks})
    for capacity in [*range(1, 40), unique - 1, unique, 10 * unique]:
        assert curve.hits(capacity) == replay(asked, "lru", capacity).hit_blocks, f"capacity {capacity}"
    assert (curve.ideal_hits, curve.unique_blocks) == (curve.hits(unique), unique)
    assert curve.blocks == sum(map(len, requests))


@settings(deadline=None, max_examples=60)
@given(st.lists(st.lists(st.integers(0, 9), max_size=6), max_size=12), st.integers(1, 11))
def test_ids_in_any_order_and_twice(requests: list[list[int]], capacity: int) -> None:
    asked = [CacheRequest(blocks, 0.0, NO_TRAITS) for blocks in requests]
    assert LruCurve(requests).hits(capacity) == replay(asked, "lru", capacity).hit_blocks


@given(st.lists(st.integers(0, 40), max_size=30), st.data())
def test_counting_is_counting(values: list[int], data: st.DataObject) -> None:
    pairs = data.draw(st.lists(st.tuples(st.integers(0, len(values)), st.integers(0, 50)), max_size=10))
    ends, least = (np.array([pair[at] for pair in pairs], np.int64) for at in (0, 1))
    expected = [sum(value >= bound for value in values[:end]) for end, bound in pairs]
    assert _count_at_least(np.array(values, np.int64), ends, least).tolist() == expected


@pytest.mark.parametrize("requests", [[], [[]], [[1]]])
def test_nothing_to_hit(requests: list[list[int]]) -> None:
    curve = LruCurve(requests)
    assert (curve.ideal_hits, curve.hits(5)) == (0, 0)
