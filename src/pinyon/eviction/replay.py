"""A cache of equal blocks, replayed without time: what a policy keeps of what requests ask for.

Semantics that anybody can repeat: a hit is a block of the longest leading run that is resident; then all blocks of the
request are used or stored (resident ones behind a gap count as misses, and are used); then the policy evicts until what
is resident fits, the request's own blocks not spared. Service takes no time. What is deeper is told first, so that it
goes first where a policy has no opinion.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import NamedTuple

import numpy as np

from pinyon.eviction.belady import Belady
from pinyon.eviction.policies import EVICTION_POLICIES
from pinyon.eviction.policy import EvictionPolicy, Traits, learner

__all__ = ["BELADY", "Asked", "CacheReplay", "Future", "replay"]

NEVER = float("inf")
BELADY = "belady"
PROGRESS_EVERY = 256


class CacheReplay:
    """``capacity`` in blocks. Ids are any integers."""

    def __init__(self, policy: EvictionPolicy[int], capacity: int) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._policy = policy
        self._learn = learner(policy)
        self._capacity = capacity
        self._resident: set[int] = set()
        self.requests = 0
        self.blocks = 0
        """Asked for."""
        self.hit_blocks = 0
        self.evicted = 0

    @property
    def resident(self) -> int:
        return len(self._resident)

    def __contains__(self, block: object) -> bool:
        return block in self._resident

    def hits(self, blocks: Sequence[int]) -> int:
        """The longest leading run that is resident."""
        resident = self._resident
        for count, block in enumerate(blocks):
            if block not in resident:
                return count
        return len(blocks)

    def request(self, blocks: Sequence[int], now_s: float, traits: Traits) -> int:
        """How many of its blocks were hits."""
        self._learn(now_s)
        hits = self.hits(blocks)
        self.requests += 1
        self.blocks += len(blocks)
        self.hit_blocks += hits
        places: Sequence[int] = range(len(blocks))
        if len(set(blocks)) != len(blocks):  # one that comes twice is used once, where it is first
            first: dict[int, int] = {}
            for place, block in enumerate(blocks):
                first.setdefault(block, place)
            blocks, places = list(first), list(first.values())
        self._tell(blocks, places, now_s, traits)
        excess = len(self._resident) - self._capacity
        if excess > 0:
            gone = self._policy.victims(excess, now_s)
            self._resident.difference_update(gone)
            self.evicted += len(gone)
        return hits

    def _tell(self, blocks: Sequence[int], places: Sequence[int], now_s: float, traits: Traits) -> None:
        """Run by run of resident blocks and others, the deepest first."""
        policy, resident = self._policy, self._resident
        end = len(blocks)
        while end:
            known = blocks[end - 1] in resident
            start = end - 1
            while start and (blocks[start - 1] in resident) is known:
                start -= 1
            run, at = blocks[start:end], places[start:end]
            if known:
                policy.used(run, now_s, traits, at)
            else:
                policy.stored(run, now_s, traits, at, blocks[start - 1] if start else None)
                resident.update(run)
            end = start

    def result(self) -> dict[str, float]:
        return {
            "requests": self.requests,
            "blocks": self.blocks,
            "hit_blocks": self.hit_blocks,
            "hit_ratio": self.hit_blocks / self.blocks if self.blocks else 0.0,
        }


class Future:
    """What Belady alone must know: which request, by number, is the next one that uses a block of the present one."""

    def __init__(self, requests: Sequence[Sequence[int]]) -> None:
        self._requests = requests
        self._ends = [0]
        for blocks in requests:
            self._ends.append(self._ends[-1] + len(blocks))
        self._next = np.full(self._ends[-1], NEVER)
        seen: dict[int, float] = {}
        for number in range(len(requests) - 1, -1, -1):
            blocks = requests[number]
            self._next[self._ends[number] : self._ends[number + 1]] = [seen.get(block, NEVER) for block in blocks]
            seen.update(dict.fromkeys(blocks, float(number)))
        self._now: dict[int, float] = {}

    def at(self, number: int) -> None:
        """The request with this number is the present one."""
        after = self._next[self._ends[number] : self._ends[number + 1]].tolist()
        self._now = dict(zip(self._requests[number], after, strict=True))

    def next_use(self, block: int) -> float:
        return self._now[block]


class Asked(NamedTuple):
    """One request, as a cache sees it."""

    blocks: Sequence[int]
    now_s: float
    traits: Traits


def replay(
    requests: Sequence[Asked], choice: str, capacity: int, progress: Callable[[int], None] = lambda _: None
) -> CacheReplay:
    """All of them, in this order, with the policy of that choice; ``belady`` sees nothing beyond them. ``progress``
    hears how many are done, now and then. Raises ``ValueError`` for an unknown choice."""
    future = Future([each.blocks for each in requests]) if choice == BELADY else None
    policy: EvictionPolicy[int] = EVICTION_POLICIES.make(choice) if future is None else Belady(future.next_use)
    cache = CacheReplay(policy, capacity)
    for number, asked in enumerate(requests):
        if future is not None:
            future.at(number)
        cache.request(*asked)
        if number % PROGRESS_EVERY == 0:
            progress(number)
    progress(len(requests))
    return cache
