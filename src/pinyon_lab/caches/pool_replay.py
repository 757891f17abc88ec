"""A cache that is spread over nodes, replayed without time: which node a request runs on, which one makes room.

Three kinds. *Local* caches behind a router: a request uses and fills the cache of the node that it runs on, and a hit
is a block of the longest leading run that is resident *there*; a block may be on several nodes. The *global* pool: one
cache as large as all nodes together, with one order; a hit is a block of the longest leading run that is resident
anywhere. The *coldest* node makes room: the global pool without a global order; hits as there. What else happens, and
when, is as in :mod:`pinyon_lab.caches.replay`; with one node all of them are that.

Each node has a policy of its own. What one learns (``workload_aware``) is of its node alone, so that its worth compares
badly with that of another; ``belady`` knows when a block is used next, not where.
"""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Protocol

from pinyon.core.policies import check_bounds
from pinyon.eviction.policy import EvictionPolicy, Traits, learner
from pinyon.eviction.runs import runs
from pinyon_lab.caches.cache import Cache, Chooser, each_once, leading_run
from pinyon_lab.caches.replay import CacheReplay, MakePolicy


class Router(Protocol):
    def route(self, blocks: int, longest: int, holders: int, asked: Sequence[int]) -> int:
        """The node for a request of so many ``blocks``.

        Args:
            longest: blocks of its longest leading run that is resident on one node
            holders: bit n: node n has that run; all bits where there is none
            asked: blocks of the requests that ran on each node so far: its load
        """
        ...


class RoundRobin:
    """All in turn."""

    def __init__(self) -> None:
        self._next = 0

    def route(self, blocks: int, longest: int, holders: int, asked: Sequence[int]) -> int:
        node = self._next
        self._next = (node + 1) % len(asked)
        return node


@dataclass(frozen=True, slots=True)
class Affinity:
    """``min_share``: of the request's blocks, for a run to count; in [0, 1]."""

    min_share: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, min_share=(0, 1))


class CacheAffinity:
    """The node with the longest leading run; of equal ones the one with the least load, then the lowest number.

    Where all requests begin alike, one node has the longest run of all that is new: ``min_share`` sends to the least
    load what hits less than that.
    """

    def __init__(self, settings: Affinity) -> None:
        self._min_share = settings.min_share

    def route(self, blocks: int, longest: int, holders: int, asked: Sequence[int]) -> int:
        if longest < self._min_share * blocks:
            holders = -1
        return min((node for node in range(len(asked)) if holders >> node & 1), key=asked.__getitem__)


class LastCopies:
    """Of the next ``look_ahead`` victims of ``policy`` the first one goes that has another copy elsewhere; if none has,
    the first one.

    Those that are passed over keep their order and are next again. To the policy they have gone: what is used meanwhile
    is told to it as stored.
    """

    def __init__(self, policy: Chooser, elsewhere: Callable[[int], bool], look_ahead: int) -> None:
        self._policy = policy
        self._elsewhere = elsewhere
        self._look_ahead = look_ahead
        self._next: dict[int, None] = {}
        """The policy's victims, in their order, that are still held."""

    def stored(
        self, keys: Sequence[int], now_s: float, traits: Traits, offsets: Sequence[int], after: int | None = None
    ) -> None:
        self._policy.stored(keys, now_s, traits, offsets, after)

    def used(self, keys: Sequence[int], now_s: float, traits: Traits, offsets: Sequence[int]) -> None:
        for start, end, passed_over in runs(keys, self._next):
            run, at = keys[start:end], offsets[start:end]
            if passed_over:
                self._policy.stored(run, now_s, traits, at, keys[start - 1] if start else None)
                for key in run:
                    del self._next[key]
            else:
                self._policy.used(run, now_s, traits, at)

    def victims(self, count: int, now_s: float) -> list[int]:
        gone: list[int] = []
        while len(gone) < count and (key := self._first(now_s)) is not None:
            del self._next[key]
            gone.append(key)
        return gone

    def _first(self, now_s: float) -> int | None:
        passed_over = self._next
        for key in passed_over:
            if self._elsewhere(key):
                return key
        while len(passed_over) < self._look_ahead and (found := self._policy.victims(1, now_s)):
            passed_over[found[0]] = None
            if self._elsewhere(found[0]):
                return found[0]
        return next(iter(passed_over), None)


NODES_MAX = 1024


@dataclass(frozen=True, slots=True)
class PoolSize:
    nodes: int
    capacity: int
    """Of each node, in blocks."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity must be positive, got {self.capacity}")
        check_bounds(self, nodes=(1, NODES_MAX))


class LocalCaches:
    """``last_copies``: among so many next victims one goes first that has another copy in the pool (0: none is looked
    for), see :class:`LastCopies`."""

    def __init__(self, make: MakePolicy, size: PoolSize, router: Router, last_copies: int = 0) -> None:
        policies = [make() for _ in range(size.nodes)]
        self._router = router
        self._where: dict[int, int] = {}
        """Of each resident block, bit n: node n has it."""
        spare = last_copies > 0 and size.nodes > 1
        self._caches = [
            Cache(
                LastCopies(policy, self._elsewhere(node), last_copies) if spare else policy,
                size.capacity,
                learner(policy),
            )
            for node, policy in enumerate(policies)
        ]
        self._asked = [0] * size.nodes
        self._requests = [0] * size.nodes
        self._hits = [0] * size.nodes
        self._pool_hits = 0

    def _elsewhere(self, node: int) -> Callable[[int], bool]:
        bit = 1 << node
        return lambda block: self._where[block] != bit

    def request(self, blocks: Sequence[int], now_s: float, traits: Traits) -> int:
        """How many of its blocks were hits on its node."""
        where, alive, hits = self._where, -1, 0
        for block in blocks:
            holders = alive & where.get(block, 0)
            if not holders:
                break
            alive = holders
            hits += 1
        node = self._router.route(len(blocks), hits, alive, self._asked)
        cache = self._caches[node]
        self._pool_hits += leading_run(blocks, where)
        if not alive >> node & 1:
            hits = leading_run(blocks, cache.resident)
        self._requests[node] += 1
        self._asked[node] += len(blocks)
        self._hits[node] += hits
        cache.tell(*each_once(blocks), now_s, traits)
        bit = 1 << node
        for block in blocks:
            where[block] = where.get(block, 0) | bit
        for block in cache.shrink(now_s):
            left = where[block] & ~bit
            if left:
                where[block] = left
            else:
                del where[block]
        return hits

    def result(self) -> dict[str, Any]:
        """``duplicate_blocks``: resident copies beyond the first; ``pool_hit_blocks``: what the hits were if a request
        read from all nodes."""
        resident = sum(len(cache.resident) for cache in self._caches)
        return {
            **_total(self._caches),
            "duplicate_blocks": resident - len(self._where),
            "pool_hit_blocks": self._pool_hits,
            "per_node": [
                {"requests": requests, "blocks": asked, "hit_blocks": hits, **_kept(cache)}
                for requests, asked, hits, cache in zip(
                    self._requests, self._asked, self._hits, self._caches, strict=True
                )
            ],
        }


class GlobalPool(CacheReplay):
    """One cache as large as all nodes together."""

    def __init__(self, make: MakePolicy, size: PoolSize) -> None:
        super().__init__(make(), size.nodes * size.capacity)

    def result(self) -> dict[str, Any]:
        return {**_kept(self), "per_node": []}


class Coldest:
    """Each block is on one node. For a new one ``candidates`` nodes are drawn: it goes to that with the most room or,
    where all are full, to the one whose next victim is worth least (:meth:`EvictionPolicy.peek`, as it was before the
    request; of equal ones to the one that got the fewest blocks of this request). Then each node makes room by its own
    order. With two candidates a pool is nearly as good as with one order ("the power of two choices"); with one, blocks
    go anywhere.
    """

    def __init__(self, make: MakePolicy, size: PoolSize, candidates: int, rng: random.Random) -> None:
        self._candidates = min(candidates, size.nodes)
        self._policies = [make() for _ in range(size.nodes)]
        self._caches = [Cache(policy, size.capacity, learner(policy)) for policy in self._policies]
        self._rng = rng
        self._where: dict[int, int] = {}
        self._hits = [0] * size.nodes

    def request(self, blocks: Sequence[int], now_s: float, traits: Traits) -> int:
        """How many of its blocks were hits."""
        where = self._where
        hits = leading_run(blocks, where)
        for block in blocks[:hits]:
            self._hits[where[block]] += 1
        once, places = each_once(blocks)
        room = _Room(self._policies, self._caches, now_s)
        nodes = range(len(self._caches))
        told: dict[int, tuple[list[int], list[int]]] = {}
        for block, place in zip(once, places, strict=True):
            node = where.get(block, -1)
            if node < 0:
                where[block] = node = room.of(self._rng.sample(nodes, self._candidates))
            on_node = told.setdefault(node, ([], []))
            on_node[0].append(block)
            on_node[1].append(place)
        for node, (its, at) in told.items():
            self._caches[node].tell(its, at, now_s, traits)
            for block in self._caches[node].shrink(now_s):
                del where[block]
        return hits

    def result(self) -> dict[str, Any]:
        """A node's hits are those of its blocks."""
        return {
            **_total(self._caches),
            "per_node": [
                {"hit_blocks": hits, **_kept(cache)} for hits, cache in zip(self._hits, self._caches, strict=True)
            ],
        }


class _Room:
    """Where the new blocks of one request go."""

    def __init__(self, policies: Sequence[EvictionPolicy[int]], caches: Sequence[Cache], now_s: float) -> None:
        self._policies = policies
        self._now_s = now_s
        self._room = [cache.capacity - len(cache.resident) for cache in caches]
        self._worth: dict[int, float] = {}

    def of(self, candidates: Sequence[int]) -> int:
        room = self._room
        node = max(candidates, key=room.__getitem__)
        if room[node] <= 0 and len(candidates) > 1:  # not asked for nothing: peeking moves SIEVE's hand
            node = min(candidates, key=lambda each: (self._head(each), -room[each]))
        room[node] -= 1
        return node

    def _head(self, node: int) -> float:
        worth = self._worth.get(node)
        if worth is None:
            head = self._policies[node].peek(self._now_s)
            worth = self._worth[node] = -math.inf if head is None else head[0]
        return worth


def _kept(cache: Cache) -> dict[str, int]:
    return {"resident_blocks": len(cache.resident), "evicted_blocks": cache.evicted}


def _total(caches: Sequence[Cache]) -> dict[str, int]:
    kept = [_kept(cache) for cache in caches]
    return {name: sum(each[name] for each in kept) for name in kept[0]}
