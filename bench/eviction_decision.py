"""The cost of a policy: CPU time of all that it is told and asked, per block that it evicts.

A replay is run with the policy, and again with one that only plays back the same victims: the difference is the
policy's. Fits of policies that learn are included; in services a thread makes them."""

from __future__ import annotations

import gc
import time
from collections.abc import Iterator, Sequence

from bench.report import summary
from pinyon.eviction import EVICTION_POLICIES, Traits
from pinyon_lab.caches.cache import Cache, Chooser, each_once
from pinyon_lab.caches.replay import CacheRequest

DECISION_US = 20.0
"""The aim per evicted block; the paper's policy takes 79 µs ("KVCache cache in the wild" §4.2)."""


class Playback:
    """A policy that hears nothing and has the victims of another."""

    def __init__(self, gone: Sequence[list[int]]) -> None:
        self._gone: Iterator[list[int]] = iter(gone)

    def stored(
        self, keys: Sequence[int], now_s: float, traits: Traits, offsets: Sequence[int], after: int | None = None
    ) -> None:
        pass

    def used(self, keys: Sequence[int], now_s: float, traits: Traits, offsets: Sequence[int]) -> None:
        pass

    def victims(self, count: int, now_s: float) -> list[int]:
        return next(self._gone)


def _run(requests: Sequence[CacheRequest], policy: Chooser, capacity: int) -> tuple[float, list[list[int]]]:
    """Returns the CPU seconds of a replay, and the victims of each eviction."""
    cache, gone = Cache(policy, capacity), []
    gc.collect()
    began_s = time.process_time()
    for blocks, now_s, traits in requests:
        cache.tell(*each_once(blocks), now_s, traits)
        if victims := cache.shrink(now_s):
            gone.append(victims)
    return time.process_time() - began_s, gone


def decision_us(requests: Sequence[CacheRequest], choice: str, capacity: int) -> tuple[float, int]:
    """Returns the CPU µs per evicted block, and the number of evicted blocks, of which there must be some."""
    whole_s, gone = _run(requests, EVICTION_POLICIES.make(choice), capacity)
    replay_s, _ = _run(requests, Playback(gone), capacity)
    evicted = sum(map(len, gone))
    return 1e6 * (whole_s - replay_s) / evicted, evicted


def decisions(
    requests: Sequence[CacheRequest], capacity: int, policies: Sequence[str], rounds: int
) -> dict[str, dict[str, float]]:
    """Measures the policies in turn, and returns median, least and most of the rounds by policy."""
    seen: dict[str, list[float]] = {policy: [] for policy in policies}
    evicted: dict[str, int] = {}
    for _ in range(rounds):
        for policy in policies:
            cost_us, evicted[policy] = decision_us(requests, policy, capacity)
            seen[policy].append(cost_us)
    return {policy: {**summary(values, 2), "evicted_blocks": evicted[policy]} for policy, values in seen.items()}
