"""One cache of equal blocks and its eviction policy, for replays, in which nothing is pinned."""

from __future__ import annotations

from collections.abc import Container, Iterable, Iterator, Sequence
from typing import Protocol

from pinyon.eviction.interface import Traits, learner
from pinyon.eviction.runs import runs


class Chooser(Protocol):
    """The part of an eviction policy that a replay needs."""

    def stored(
        self, keys: Sequence[int], now_s: float, traits: Traits, offsets: Sequence[int], after: int | None = None
    ) -> None: ...

    def used(self, keys: Sequence[int], now_s: float, traits: Traits, offsets: Sequence[int]) -> None: ...

    def victims(self, count: int, now_s: float) -> list[int]: ...


class Cache:
    """A cache of ``capacity`` blocks; block ids are any integers.

    Between :meth:`tell` and :meth:`shrink` more blocks may be resident than fit. The policy, or the one that ``learns``
    in its place, learns only when something is evicted, as in services. Earlier, it would learn from a cache that is
    not full yet."""

    def __init__(self, policy: Chooser, capacity: int, learns: object = None) -> None:
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._policy = policy
        self._learn = learner(policy if learns is None else learns)
        self.capacity = capacity
        self.resident: set[int] = set()
        self.evicted = 0

    def tell(self, blocks: Sequence[int], places: Sequence[int], now_s: float, traits: Traits) -> None:
        """Tells the policy that a request uses these blocks, or stores new ones: run by run, the deepest first."""
        for start, end, known in runs(blocks, self.resident):
            run, at = blocks[start:end], places[start:end]
            if known:
                self._policy.used(run, now_s, traits, at)
            else:
                self._policy.stored(run, now_s, traits, at, blocks[start - 1] if start else None)
                self.resident.update(run)

    def shrink(self, now_s: float) -> list[int]:
        """Evicts blocks until the rest fits and returns them."""
        excess = len(self.resident) - self.capacity
        if excess <= 0:
            return []
        self._learn(now_s)
        gone = self._policy.victims(excess, now_s)
        self.resident.difference_update(gone)
        self.evicted += len(gone)
        return gone

    def kept(self) -> dict[str, int]:
        return {"resident_blocks": len(self.resident), "evicted_blocks": self.evicted}


def leading_run(blocks: Sequence[int], inside: Container[int]) -> int:
    """Returns how many leading blocks are inside without a gap."""
    for count, block in enumerate(blocks):
        if block not in inside:
            return count
    return len(blocks)


def endless_hits(requests: Iterable[Sequence[int]]) -> Iterator[int]:
    """Yields for each request how many of its blocks are found by a cache that never evicts."""
    seen: set[int] = set()
    for blocks in requests:
        yield leading_run(blocks, seen)
        seen.update(blocks)


def each_once(blocks: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """Returns the distinct blocks of a request with their places; a repeated block counts at its first place."""
    if len(set(blocks)) == len(blocks):
        return blocks, range(len(blocks))
    first: dict[int, int] = {}
    for place, block in enumerate(blocks):
        first.setdefault(block, place)
    return list(first), list(first.values())
