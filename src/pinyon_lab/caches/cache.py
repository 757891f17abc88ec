"""What is resident in one cache of equal blocks, and the policy that says what goes. For replays: nothing is pinned."""

from __future__ import annotations

from collections.abc import Callable, Container, Iterable, Iterator, Sequence
from typing import Protocol

from pinyon.eviction.policy import Traits
from pinyon.eviction.runs import runs


class Chooser(Protocol):
    """The part of an eviction policy that a replay needs."""

    def stored(
        self, keys: Sequence[int], now_s: float, traits: Traits, offsets: Sequence[int], after: int | None = None
    ) -> None: ...

    def used(self, keys: Sequence[int], now_s: float, traits: Traits, offsets: Sequence[int]) -> None: ...

    def victims(self, count: int, now_s: float) -> list[int]: ...


class Cache:
    """``capacity`` in blocks; ids are any integers. More than fits is resident between :meth:`tell` and
    :meth:`shrink`."""

    def __init__(self, policy: Chooser, capacity: int, learn: Callable[[float], None]) -> None:
        """``learn``: of the policy, see :func:`pinyon.eviction.policy.learner`. It does where something is evicted, as
        in services: what it learned sooner would be of a cache that is not full yet."""
        if capacity <= 0:
            raise ValueError(f"capacity must be positive, got {capacity}")
        self._policy = policy
        self._learn = learn
        self.capacity = capacity
        self.resident: set[int] = set()
        self.evicted = 0

    def tell(self, blocks: Sequence[int], places: Sequence[int], now_s: float, traits: Traits) -> None:
        """A request uses these, each once, and stores those that are not resident: run by run, the deepest first."""
        for start, end, known in runs(blocks, self.resident):
            run, at = blocks[start:end], places[start:end]
            if known:
                self._policy.used(run, now_s, traits, at)
            else:
                self._policy.stored(run, now_s, traits, at, blocks[start - 1] if start else None)
                self.resident.update(run)

    def shrink(self, now_s: float) -> list[int]:
        """What goes, so that the rest fits."""
        excess = len(self.resident) - self.capacity
        if excess <= 0:
            return []
        self._learn(now_s)
        gone = self._policy.victims(excess, now_s)
        self.resident.difference_update(gone)
        self.evicted += len(gone)
        return gone


def leading_run(blocks: Sequence[int], inside: Container[int]) -> int:
    """How many from the start are inside without a gap."""
    for count, block in enumerate(blocks):
        if block not in inside:
            return count
    return len(blocks)


def endless_hits(requests: Iterable[Sequence[int]]) -> Iterator[int]:
    """Of each request, the blocks that a cache finds which forgets nothing."""
    seen: set[int] = set()
    for blocks in requests:
        yield leading_run(blocks, seen)
        seen.update(blocks)


def each_once(blocks: Sequence[int]) -> tuple[Sequence[int], Sequence[int]]:
    """The blocks of a request with their places; one that comes twice is there once, where it is first."""
    if len(set(blocks)) == len(blocks):
        return blocks, range(len(blocks))
    first: dict[int, int] = {}
    for place, block in enumerate(blocks):
        first.setdefault(block, place)
    return list(first), list(first.values())
