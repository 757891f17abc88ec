"""A cache that is spread over nodes, replayed without time: which node serves a request, and which node evicts.

There are three kinds:

- *Local* caches behind a router: a request uses and fills the cache of the node that it runs on. A hit is a block of
  the longest leading run that is resident *there*; a block may be on several nodes.
- The *global* pool: one cache as large as all nodes together, with one order. A hit is a block of the longest leading
  run that is resident anywhere.
- The *coldest* node evicts: a pool like the global one, but without a global order; hits are counted in the same way.

All other rules are those of :mod:`pinyon_lab.caches.replay`; with one node, all three kinds equal that replay.

Each node has a policy of its own. A policy that learns (``workload_aware``) knows only its node, so its worths compare
badly with those of other nodes. ``belady`` knows when a block is used next, but not where."""

from __future__ import annotations

import functools
import math
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from itertools import count
from typing import Any, NamedTuple, Protocol

from pinyon.core.policies import NoSettings, Registry, check_bounds
from pinyon.eviction.interface import Traits
from pinyon.eviction.runs import runs
from pinyon_lab.caches.cache import Cache, Chooser, each_once, leading_run
from pinyon_lab.caches.replay import CacheReplay, MakePolicy, Replaying

Router = Callable[[int, int, int, Sequence[int]], int]
"""A function that chooses a node for a request. It gets the numbers of its blocks and of its longest run on any node.

Bit n of the third argument, ``holders``, says that node n has this run (all bits: there is none). The last one,
``asked``, has the load of each node: the number of blocks of the requests that ran there so far."""


def in_turn() -> Router:
    """Returns a router that takes the nodes in turn."""
    turns = count()
    return lambda blocks, longest, holders, asked: next(turns) % len(asked)


@dataclass(frozen=True, slots=True)
class CacheAffinityRouter:
    """A router to the node with the longest leading run; ties go to the least load, then to the lowest number.

    If all requests begin alike, one node has the longest run of every new request. So a run counts only from the share
    ``min_share`` of the request's blocks on, in [0, 1]; requests with shorter runs go to the node with the least load.
    """

    min_share: float = 0.0

    def __post_init__(self) -> None:
        check_bounds(self, min_share=(0, 1))

    def route(self, blocks: int, longest: int, holders: int, asked: Sequence[int]) -> int:
        if longest < self.min_share * blocks:
            holders = -1
        return min((node for node in range(len(asked)) if holders >> node & 1), key=asked.__getitem__)


class LastCopies:
    """A policy that evicts, among the next ``look_ahead`` victims of ``policy``, the first that has a copy elsewhere.

    If none has a copy, the first victim goes. Victims that are passed over keep their order and are next again. To
    ``policy`` they are gone: if a request uses one meanwhile, the policy is told that the victim was stored."""

    def __init__(self, policy: Chooser, elsewhere: Callable[[int], bool], look_ahead: int) -> None:
        self._policy = policy
        self._elsewhere = elsewhere
        self._look_ahead = look_ahead
        self._next: dict[int, None] = {}
        """The victims of the policy, in order, that are still held."""

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
    """The blocks of each node."""

    def __post_init__(self) -> None:
        if self.capacity < 1:
            raise ValueError(f"capacity must be positive, got {self.capacity}")
        check_bounds(self, nodes=(1, NODES_MAX))


class LocalCaches:
    """Caches of their own on each node, behind a router.

    With ``last_copies`` > 0, a node first evicts blocks that have another copy in the pool, among that many next
    victims; see :class:`LastCopies`."""

    def __init__(self, make: MakePolicy, size: PoolSize, router: Router, last_copies: int = 0) -> None:
        policies = [make() for _ in range(size.nodes)]
        self._router = router
        self._where: dict[int, int] = {}
        """The nodes of each resident block: bit n says that node n has it."""
        spare = last_copies > 0 and size.nodes > 1
        self._caches = [
            Cache(LastCopies(policy, self._elsewhere(node), last_copies) if spare else policy, size.capacity, policy)
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
        """Serves one request and returns how many of its blocks were hits on its node."""
        where, alive, hits = self._where, -1, 0
        for block in blocks:
            holders = alive & where.get(block, 0)
            if not holders:
                break
            alive = holders
            hits += 1
        node = self._router(len(blocks), hits, alive, self._asked)
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
        """Returns the counts of the pool and of each node.

        ``duplicate_blocks`` are resident copies beyond the first; ``pool_hit_blocks`` would be the hits if a request
        read from all nodes."""
        resident = sum(len(cache.resident) for cache in self._caches)
        return {
            **_total(self._caches),
            "duplicate_blocks": resident - len(self._where),
            "pool_hit_blocks": self._pool_hits,
            "per_node": [
                {"requests": requests, "blocks": asked, "hit_blocks": hits, **cache.kept()}
                for requests, asked, hits, cache in zip(
                    self._requests, self._asked, self._hits, self._caches, strict=True
                )
            ],
        }


CANDIDATES_MAX = 16


@dataclass(frozen=True, slots=True)
class Drawn:
    """The settings of :class:`Coldest`: the number of candidate nodes per run, and the seed that draws them."""

    candidates: int = 2
    seed: int = 1
    run_blocks: int = 1
    """The new blocks of a request that go to one node, as runs do in a store."""
    renew_s: float = 0.0
    """The seconds for which what is known of the nodes stays as it was; 0: it is always up to date."""
    read_first: bool = False
    """True if the hits are used before the other blocks are stored, as by a store's client; False: all in one go."""

    def __post_init__(self) -> None:
        check_bounds(self, candidates=(1, CANDIDATES_MAX), run_blocks=(1, math.inf), renew_s=(0, math.inf))


class Coldest:
    """A pool that has each block on one node, and draws ``candidates`` nodes for each run of new blocks.

    The run goes to the candidate with the most room. If all are full, it goes to the one whose next victim is worth
    least (:meth:`EvictionPolicy.peek`, as it was before the request). Ties go to the candidate that got the fewest
    blocks of this request. Then each node evicts by its own order. With two candidates, a pool is nearly as good as
    with one global order ("the power of two choices"); with one candidate, runs go anywhere.

    With ``renew_s``, rooms and worths are those at the first request since a multiple of so many seconds, as in a store
    whose nodes renew their records by then. With ``read_first``, new blocks outlive those before them, and what is
    resident behind a gap is not used."""

    def __init__(self, make: MakePolicy, size: PoolSize, drawn: Drawn) -> None:
        self._drawn = drawn
        self._candidates = min(drawn.candidates, size.nodes)
        self._policies = [make() for _ in range(size.nodes)]
        self._caches = [Cache(policy, size.capacity) for policy in self._policies]
        self._rng = random.Random(drawn.seed)
        self._where: dict[int, int] = {}
        self._hits = [0] * size.nodes
        self._renewal = -math.inf
        self._room: list[int] = []
        self._worth: Callable[[int], float] = lambda node: -math.inf

    def request(self, blocks: Sequence[int], now_s: float, traits: Traits) -> int:
        """Serves one request and returns how many of its blocks were hits."""
        where = self._where
        hits = leading_run(blocks, where)
        for block in blocks[:hits]:
            self._hits[where[block]] += 1
        self._renew(now_s)
        once, places = each_once(blocks)
        new = self._place(once)
        told = list(zip(once, places, strict=True))
        if self._drawn.read_first:
            self._tell([each for each in told if each[1] < hits], now_s, traits)
            told = [each for each in told if each[0] in new]
        self._tell(told, now_s, traits)
        for cache in self._caches:
            for block in cache.shrink(now_s):
                del where[block]
        return hits

    def _place(self, blocks: Sequence[int]) -> set[int]:
        """Chooses nodes for those of the blocks that are not resident, and returns these."""
        new: set[int] = set()
        node = 0
        for block in blocks:
            if block in self._where:
                continue
            if len(new) % self._drawn.run_blocks == 0:
                node = self._choose()
            self._room[node] -= not self._drawn.renew_s  # else, nobody tells
            self._where[block] = node
            new.add(block)
        return new

    def _tell(self, blocks: Sequence[tuple[int, int]], now_s: float, traits: Traits) -> None:
        """Tells each block's node that it is used or stored, given with its place."""
        told: dict[int, tuple[list[int], list[int]]] = {}
        for block, place in blocks:
            on_node = told.setdefault(self._where[block], ([], []))
            on_node[0].append(block)
            on_node[1].append(place)
        for node, (its, at) in told.items():
            self._caches[node].tell(its, at, now_s, traits)

    def _renew(self, now_s: float) -> None:
        """Looks at the nodes' room and worth, if that is due."""
        every_s = self._drawn.renew_s
        if every_s and now_s // every_s == self._renewal:
            return
        self._renewal = now_s // every_s if every_s else 0.0
        self._room = [cache.capacity - len(cache.resident) for cache in self._caches]
        # Peeking moves SIEVE's hand, so it is done only where the choice needs it.
        self._worth = functools.cache(lambda node: self._worth_of(node, now_s))
        if every_s and self._candidates > 1:
            for node in range(len(self._caches)):
                self._worth(node)

    def _choose(self) -> int:
        """Returns the node of a new run."""
        room = self._room
        candidates = self._rng.sample(range(len(room)), self._candidates)
        node = max(candidates, key=room.__getitem__)
        if room[node] <= 0 and len(candidates) > 1:
            node = min(candidates, key=lambda each: (self._worth(each), -room[each]))
        return node

    def _worth_of(self, node: int, now_s: float) -> float:
        """Returns the worth of the node's next victim."""
        head = self._policies[node].peek(now_s)
        return -math.inf if head is None else head[0]

    def result(self) -> dict[str, Any]:
        """Returns the counts of the pool and of each node, whose hits are those of its blocks."""
        return {
            **_total(self._caches),
            "per_node": [
                {"hit_blocks": hits, **cache.kept()} for hits, cache in zip(self._hits, self._caches, strict=True)
            ],
        }


def _total(caches: Sequence[Cache]) -> dict[str, int]:
    kept = [cache.kept() for cache in caches]
    return {name: sum(each[name] for each in kept) for name in kept[0]}


LOOK_AHEAD = 8
LOOK_AHEAD_MAX = 1024


class CachePool(Replaying, Protocol):
    def result(self) -> dict[str, Any]:
        """Returns the counts of the pool and of each node."""
        ...


class Kind(NamedTuple):
    """A kind of pool: whether it has local caches, which can look for last copies, and the function that makes one."""

    local: bool
    made: Callable[[MakePolicy, PoolSize, int], CachePool]


def _local(router: Callable[[], Router]) -> Kind:
    return Kind(True, lambda make, size, last_copies: LocalCaches(make, size, router(), last_copies))


def _by_affinity(router: CacheAffinityRouter) -> Kind:
    return _local(lambda: router.route)


def _global(_: NoSettings) -> Kind:
    return Kind(False, lambda make, size, last_copies: CacheReplay(make(), size.nodes * size.capacity))


def _coldest(drawn: Drawn) -> Kind:
    return Kind(False, lambda make, size, last_copies: Coldest(make, size, drawn))


POOLS: Registry[Kind] = Registry(
    "router",
    {
        "cache_affinity": (CacheAffinityRouter, _by_affinity),
        "round_robin": (NoSettings, lambda _: _local(in_turn)),
        "global": (NoSettings, _global),
        "coldest": (Drawn, _coldest),
    },
)
"""The kinds of pools, named after the part that sends requests or blocks to nodes."""
Build = Callable[[MakePolicy], CachePool]


def pool(router: str, size: PoolSize, last_copies: int = 0) -> Build:
    """Returns a builder of pools for :func:`~pinyon_lab.caches.replay.replayed`.

    Victims with another copy are looked for among the next ``last_copies``. Raises ``ValueError`` for an unknown router
    or bad settings."""
    if not 0 <= last_copies <= LOOK_AHEAD_MAX:
        raise ValueError(f"last copies are looked for among at most {LOOK_AHEAD_MAX} victims, got {last_copies}")
    kind = POOLS.make(router)
    if last_copies and not kind.local:
        raise ValueError("last copies are looked for in local caches: in this pool, each block exists once")
    return lambda make: kind.made(make, size, last_copies)
