"""A cache of equal blocks, replayed without time, which shows how many of the requested blocks a policy keeps.

The rules are simple to repeat. A hit is a block of the longest leading run that is resident. Then all blocks of the
request are used or stored; resident blocks after a gap count as misses, but are used. Then the policy evicts until the
resident blocks fit; the request's own blocks are not spared. Service takes no time. The policy is told of deeper blocks
first, so that they are evicted first if it has no preference."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any, NamedTuple, Protocol, TypeVar

from pinyon.eviction.interface import EvictionPolicy, Key, Traits
from pinyon.eviction.policies import EVICTION_POLICIES
from pinyon.eviction.ranked import Rank
from pinyon_lab.caches.cache import Cache, each_once, leading_run
from pinyon_lab.policies.eviction import RankedPolicy


class Belady(RankedPolicy[Key]):
    """Belady's policy: evicts the key whose next use is farthest away.

    ``next_use`` returns the time of the next use of a key that is stored or used now (``inf``: never). Among keys with
    the same next use, the deepest goes first. The worth of a key is minus the time to its next use."""

    def __init__(self, next_use: Callable[[Key], float]) -> None:
        super().__init__()
        self._next_use = next_use

    def stored(
        self, keys: Sequence[Key], now_s: float, traits: Traits, offsets: Sequence[int], after: Key | None = None
    ) -> None:
        self.used(keys, now_s, traits, offsets)

    def used(self, keys: Sequence[Key], now_s: float, traits: Traits | None, offsets: Sequence[int]) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            self._rank(key, (-self._next_use(key), -offset))

    def _worth(self, rank: Rank, now_s: float) -> float:
        return float(rank[0] + now_s)


NEVER = float("inf")
BELADY = "belady"
PROGRESS_EVERY = 256


MakePolicy = Callable[[], EvictionPolicy[int]]


class Replaying(Protocol):
    """A cache, or a pool of caches, that serves requests."""

    def request(self, blocks: Sequence[int], now_s: float, traits: Traits) -> int:
        """Serves one request and returns how many of its blocks were hits."""
        ...


Replay = TypeVar("Replay", bound=Replaying)


class CacheReplay(Cache):
    """A cache of ``capacity`` blocks that counts hits. Block ids are any integers."""

    def __init__(self, policy: EvictionPolicy[int], capacity: int) -> None:
        super().__init__(policy, capacity)
        self.blocks = self.hit_blocks = 0

    def request(self, blocks: Sequence[int], now_s: float, traits: Traits) -> int:
        """Serves one request and returns its hits: the blocks of its longest leading run that is resident."""
        hits = leading_run(blocks, self.resident)
        self.blocks += len(blocks)
        self.hit_blocks += hits
        self.tell(*each_once(blocks), now_s, traits)
        self.shrink(now_s)
        return hits

    def result(self) -> dict[str, Any]:
        """Returns the counts of a pool that has one cache for all nodes."""
        return {**self.kept(), "per_node": []}


class Future:
    """The requests to come, for Belady alone: for each block of the present request, the number of its next request."""

    def __init__(self, requests: Sequence[Sequence[int]]) -> None:
        self.present = -1
        """The number of the present request; it only rises."""
        self._uses: dict[int, list[int]] = {}
        """The numbers of the requests that use each block, the next one last; past ones are removed when asked for."""
        for number in range(len(requests) - 1, -1, -1):
            for block in requests[number]:
                self._uses.setdefault(block, []).append(number)

    def next_use(self, block: int) -> float:
        uses = self._uses[block]
        while uses and uses[-1] <= self.present:
            uses.pop()
        return float(uses[-1]) if uses else NEVER


class CacheRequest(NamedTuple):
    """One request, as a cache sees it."""

    blocks: Sequence[int]
    now_s: float
    traits: Traits


def replay(
    requests: Sequence[CacheRequest], choice: str, capacity: int, progress: Callable[[int], None] = lambda _: None
) -> CacheReplay:
    """Returns a cache with the chosen policy after all of the requests, in order; see :func:`replayed`."""
    return replayed(requests, choice, lambda make: CacheReplay(make(), capacity), progress)[0]


def replayed(
    requests: Sequence[CacheRequest],
    choice: str,
    build: Callable[[MakePolicy], Replay],
    progress: Callable[[int], None] = lambda _: None,
) -> tuple[Replay, list[int]]:
    """Returns the cache that ``build`` makes, after all of the requests in this order, and the hits of each request.

    The argument of ``build`` makes policies of the choice; ``belady`` sees nothing beyond the requests. Now and then,
    ``progress`` is called with the number of finished requests. Raises ``ValueError`` for an unknown choice."""
    future = Future([each.blocks for each in requests]) if choice == BELADY else None
    cache = build(lambda: EVICTION_POLICIES.make(choice) if future is None else Belady(future.next_use))
    hits = []
    for number, asked in enumerate(requests):
        if future is not None:
            future.present = number
        hits.append(cache.request(*asked))
        if number % PROGRESS_EVERY == 0:
            progress(number)
    progress(len(requests))
    return cache, hits
