"""Every eviction policy against a naive model: lists that are searched from end to end."""

from __future__ import annotations

import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import pytest

from pinyon.eviction import EVICTION_POLICIES, NO_TRAITS, EvictionPolicy, Traits
from pinyon.eviction.fit import Fit
from pinyon.eviction.workload_aware import WorkloadAware
from pinyon_lab.caches.replay import Belady

KEYS = range(9)
TRAITS = [NO_TRAITS, Traits("text/1", "anna"), Traits("text/2", "bert")]


class Naive:
    """A model that knows which keys are held and pinned; ``choose`` is the policy."""

    def __init__(self) -> None:
        self.held: list[int] = []
        self.pins: set[int] = set()

    @property
    def free(self) -> list[int]:
        return [key for key in self.held if key not in self.pins]

    def stored(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        self.held += keys

    def used(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        pass

    def pinned(self, keys: Sequence[int]) -> None:
        self.pins |= set(keys)

    def unpinned(self, keys: Sequence[int], now_s: float) -> None:
        self.pins -= set(keys)

    def gone(self, key: int, *, evicted: bool) -> None:
        self.held.remove(key)
        self.pins.discard(key)

    def choose(self) -> int:
        raise NotImplementedError


class NaiveLru(Naive):
    def __init__(self) -> None:
        super().__init__()
        self.last: list[int] = []

    def _now(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            self.last = [each for each in self.last if each != key] + [key]

    def stored(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        super().stored(keys, offsets, now_s)
        self._now(keys)

    def used(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        self._now([key for key in keys if key not in self.pins])

    def unpinned(self, keys: Sequence[int], now_s: float) -> None:
        super().unpinned(keys, now_s)
        self._now(keys)

    def choose(self) -> int:
        return min(self.free, key=self.last.index)


class NaiveFifo(Naive):
    def __init__(self) -> None:
        super().__init__()
        self.arrivals: list[int] = []
        self.fresh: set[int] = set()

    def _arrive(self, keys: Sequence[int]) -> None:
        for key in reversed(keys):
            self.arrivals = [each for each in self.arrivals if each != key] + [key]

    def stored(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        super().stored(keys, offsets, now_s)
        self.fresh |= set(keys)
        self._arrive(keys)

    def used(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        self.fresh -= set(keys)

    def unpinned(self, keys: Sequence[int], now_s: float) -> None:
        super().unpinned(keys, now_s)
        self._arrive([key for key in keys if key in self.fresh])
        self.fresh -= set(keys)

    def gone(self, key: int, *, evicted: bool) -> None:
        super().gone(key, evicted=evicted)
        self.fresh.discard(key)

    def choose(self) -> int:
        return min(self.free, key=self.arrivals.index)


class NaiveCounted(Naive):
    greedy_dual = False

    def __init__(self) -> None:
        super().__init__()
        self.ranks: dict[int, list[int]] = {}  # value, minus offset, when
        self.uses: dict[int, int] = {}
        self.calls = self.clock = 0

    def _use(self, keys: Sequence[int], offsets: Sequence[int]) -> None:
        self.calls += 1
        for key, offset in zip(keys, offsets, strict=True):
            self.uses[key] = self.uses.get(key, 0) + 1
            self.ranks[key] = [self.clock * self.greedy_dual + self.uses[key], -offset, self.calls]

    def stored(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        super().stored(keys, offsets, now_s)
        self._use(keys, offsets)

    def used(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        self._use(keys, offsets)

    def gone(self, key: int, *, evicted: bool) -> None:
        super().gone(key, evicted=evicted)
        del self.uses[key]
        if evicted:
            self.clock = max(self.clock, self.ranks[key][0])

    def choose(self) -> int:
        return min(self.free, key=self.ranks.__getitem__)


class NaiveGdfs(NaiveCounted):
    greedy_dual = True


class NaiveBelady(Naive):
    def __init__(self) -> None:
        super().__init__()
        self.ranks: dict[int, tuple[float, int]] = {}

    def stored(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        super().stored(keys, offsets, now_s)
        self.used(keys, offsets, now_s)

    def used(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        self.ranks.update((key, (-next_use(key), -offset)) for key, offset in zip(keys, offsets, strict=True))

    def choose(self) -> int:
        return min(self.free, key=lambda key: (self.ranks[key], key))


class NaiveS3Fifo(Naive):
    """Algorithm 1 of the paper, with lists whose first element is the tail."""

    def __init__(self) -> None:
        super().__init__()
        self.small: list[int] = []
        self.main: list[int] = []
        self.ghosts: list[int] = []
        self.frequency: dict[int, int] = {}
        self.parked: dict[int, list[int]] = {}

    def stored(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        super().stored(keys, offsets, now_s)
        for key in reversed(keys):
            (self.main if key in self.ghosts else self.small).append(key)
            self.ghosts = [each for each in self.ghosts if each != key]
            self.frequency[key] = 0

    def used(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        for key in keys:
            self.frequency[key] = min(3, self.frequency[key] + 1)

    def unpinned(self, keys: Sequence[int], now_s: float) -> None:
        super().unpinned(keys, now_s)
        for key in keys:
            queue = self.parked.pop(key, None)
            if queue is not None:
                queue.insert(0, key)
                if queue is self.main:
                    self.frequency[key] = max(1, self.frequency[key])

    def gone(self, key: int, *, evicted: bool) -> None:
        super().gone(key, evicted=evicted)
        queue = self.parked.pop(key, None)
        if queue is None:
            queue = self.small if key in self.small else self.main
            queue.remove(key)
        if evicted and queue is self.small:
            self.ghosts.append(key)
            while len(self.ghosts) > 0.9 * (len(self.held) + 1):
                del self.ghosts[0]

    def choose(self) -> int:
        while True:
            from_small = bool(self.small) and (len(self.small) >= 0.1 * len(self.held) or not self.main)
            queue = self.small if from_small else self.main
            key = queue[0]
            if key in self.pins:
                self.parked[queue.pop(0)] = queue
            elif from_small and self.frequency[key] > 1:
                self.main.append(queue.pop(0))
                self.frequency[key] = 0
            elif not from_small and self.frequency[key]:
                self.main.append(queue.pop(0))
                self.frequency[key] -= 1
            else:
                return key


class NaiveSieve(Naive):
    """Algorithm 1 of the paper, with a queue whose first element is the tail; the hand is an index."""

    def __init__(self) -> None:
        super().__init__()
        self.queue: list[int] = []
        self.hand = 0
        self.visited: set[int] = set()
        self.parked: set[int] = set()

    def stored(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        super().stored(keys, offsets, now_s)
        self.queue += reversed(keys)

    def used(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        self.visited |= set(keys) & set(self.queue)

    def unpinned(self, keys: Sequence[int], now_s: float) -> None:
        super().unpinned(keys, now_s)
        for key in keys:
            if key in self.parked:
                self.parked.remove(key)
                self.visited.add(key)
                self.queue.insert(self.hand, key)
                # Before the first search, the hand begins at the current tail.
                self.hand += len(self.queue) > 1 and (self.hand > 0 or self.moved)

    moved = False
    """True if the hand stands at an object, not before the first search."""

    def _take(self, key: int) -> None:
        at = self.queue.index(key)
        del self.queue[at]
        self.visited.discard(key)
        if at < self.hand:
            self.hand -= 1
        elif at == self.hand and self.moved and at == len(self.queue):
            self.hand, self.moved = 0, False  # the next search begins at the tail

    def gone(self, key: int, *, evicted: bool) -> None:
        super().gone(key, evicted=evicted)
        if key in self.parked:
            self.parked.remove(key)
        else:
            self._take(key)

    def choose(self) -> int:
        while True:
            while self.queue[self.hand] in self.visited:
                self.visited.remove(self.queue[self.hand])
                self.hand = (self.hand + 1) % len(self.queue)
            self.moved = True
            key = self.queue[self.hand]
            if key not in self.pins:
                return key
            self._take(key)
            self.parked.add(key)


class NaiveWorkloadAware(Naive):
    """Fig. 24, by a search of all blocks. Among equals the block whose last event came first is evicted."""

    def __init__(self) -> None:
        super().__init__()
        self.entries: dict[int, tuple[str, float, int]] = {}  # category, last use, place
        self.events: list[int] = []
        self.fits: dict[str, Fit] = {"": Fit(0.5, 60.0)}
        self.traits: Traits | None = NO_TRAITS
        self.now_s = 0.0

    def _now(self, key: int, category: str, now_s: float, place: int) -> None:
        self.entries[key] = (category, now_s, place)
        self.events = [each for each in self.events if each != key] + [key]

    def stored(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        super().stored(keys, offsets, now_s)
        assert self.traits is not None
        for key, offset in zip(keys, offsets, strict=True):
            self._now(key, self.traits.category, now_s, offset)

    def used(self, keys: Sequence[int], offsets: Sequence[int], now_s: float) -> None:
        for key, offset in zip(keys, offsets, strict=True):
            category, _, place = self.entries[key]
            if self.traits is not None:
                category, place = self.traits.category, offset
            self._now(key, category, now_s, place)

    def unpinned(self, keys: Sequence[int], now_s: float) -> None:
        super().unpinned(keys, now_s)
        for key in keys:
            category, _, place = self.entries[key]
            self._now(key, category, now_s, place)

    def choose(self) -> int:
        def priority(key: int) -> tuple[float, int]:
            category, last_s, place = self.entries[key]
            share, mean_s = self.fits.get(category, self.fits[""])
            age_s = self.now_s - last_s
            return share * (math.exp(-age_s / mean_s) - math.exp(-(age_s + 60.0) / mean_s)), -place

        least = min(map(priority, self.free))
        return next(key for key in self.events if key in self.free and priority(key) == least)


_next_uses: dict[int, float] = {}


def next_use(key: int) -> float:
    return _next_uses.get(key, float("inf"))


MODELS: dict[str, Callable[[], Naive]] = {
    "lru": NaiveLru,
    "fifo": NaiveFifo,
    "lfu": NaiveCounted,
    "gdfs": NaiveGdfs,
    "belady": NaiveBelady,
    "s3fifo": NaiveS3Fifo,
    "sieve": NaiveSieve,
    "workload_aware": NaiveWorkloadAware,
}


class Machine:
    """One policy and its model, which get the same random calls."""

    def __init__(self, name: str, seed: int) -> None:
        _next_uses.clear()
        self.random = random.Random(seed)
        self.policy: EvictionPolicy[int] = Belady(next_use) if name == "belady" else EVICTION_POLICIES.make(name)
        self.model = MODELS[name]()
        self.now_s = 0.0

    def some(self, keys: Sequence[int]) -> tuple[list[int], list[int]]:
        """Returns keys and their rising offsets."""
        random_ = self.random
        self.now_s += random_.choice([0.0, 0.5])
        chosen = random_.sample(keys, random_.randint(0, min(4, len(keys))))
        first = random_.randint(0, 3)
        _next_uses.update((key, random_.choice([1.0, 2.0, 7.0, float("inf")])) for key in chosen)
        return chosen, list(range(first, first + len(chosen)))

    def traits(self, choices: Sequence[Traits | None]) -> Any:
        chosen = self.random.choice(choices)
        if isinstance(self.model, NaiveWorkloadAware):
            self.model.traits = chosen
        return chosen

    def learn(self) -> None:
        if isinstance(self.policy, WorkloadAware) and isinstance(self.model, NaiveWorkloadAware):
            share, mean = self.random.random, self.random.uniform
            names = self.random.sample(["text/1", "text/2"], self.random.randint(0, 2))
            self.model.fits = {name: Fit(share(), mean(0.5, 100.0)) for name in ("", *names)}
            self.policy.adopt(self.model.fits)

    def stored(self) -> None:
        keys, offsets = self.some([key for key in KEYS if key not in self.model.held])
        self.policy.stored(keys, self.now_s, self.traits(TRAITS), offsets)
        self.model.stored(keys, offsets, self.now_s)

    def used(self) -> None:
        keys, offsets = self.some(self.model.held)
        self.policy.used(keys, self.now_s, self.traits([*TRAITS, None]), offsets)
        self.model.used(keys, offsets, self.now_s)

    def pinned(self) -> None:
        keys, _ = self.some(self.model.free)
        self.policy.pinned(keys, self.now_s)
        self.model.pinned(keys)

    def unpinned(self) -> None:
        keys, _ = self.some(sorted(self.model.pins))
        self.policy.unpinned(keys, self.now_s)
        self.model.unpinned(keys, self.now_s)

    def dropped(self) -> None:
        keys, _ = self.some(self.model.held)
        self.policy.dropped(keys, self.now_s)
        for key in keys:
            self.model.gone(key, evicted=False)

    def victims(self) -> None:
        self.at()
        count = self.random.choice([0, 1, 1, 1, 2, 6])
        expected = []
        while len(expected) < count and self.model.free:
            expected.append(self.model.choose())
            self.model.gone(expected[-1], evicted=True)
        assert self.policy.victims(count, self.now_s) == expected

    def peek(self) -> None:
        """Checks that the policy names the next victim, and the same again while nothing happens."""
        self.at()
        found = self.policy.peek(self.now_s)
        if not self.model.free:
            assert found is None
            return
        assert found is not None
        assert found[1] == self.model.choose()
        assert self.policy.peek(self.now_s) == found
        assert self.policy.victims(1, self.now_s) == [found[1]]
        self.model.gone(found[1], evicted=True)

    def at(self) -> None:
        if isinstance(self.model, NaiveWorkloadAware):
            self.model.now_s = self.now_s

    def run(self, steps: int) -> None:
        rules = [self.stored, self.used, self.pinned, self.unpinned, self.dropped, self.victims, self.peek, self.learn]
        weights = [4, 6, 2, 2, 1, 2, 1, 1]
        for rule in self.random.choices(rules, weights, k=steps):
            rule()
            assert len(self.policy) == len(self.model.free)
            assert [key for key in KEYS if key in self.policy] == sorted(self.model.free)


@pytest.mark.parametrize("name", sorted(MODELS))
def test_against_the_model(name: str) -> None:
    for number in range(300):
        try:
            Machine(name, number).run(80)
        except Exception as error:
            error.add_note(f"seed {number}")
            raise


def test_every_policy_has_a_model() -> None:
    learned_by_requests = {"reuse_hazard"}  # test_eviction_reuse_hazard_model
    assert set(MODELS) == {*EVICTION_POLICIES.names, "belady"} - learned_by_requests


def test_the_illustration_of_sieve_in_its_paper() -> None:
    """The queue has seven places; A, B and G were visited; requests for H, A, D, I, B, J then evict C, E and F."""
    policy: EvictionPolicy[str] = EVICTION_POLICIES.make("sieve")
    evicted = []
    for key in "AABBCDEFGG" + "HADIBJ":
        if key in policy:
            policy.used([key], 0.0, None, [0])
            continue
        if len(policy) == 7:
            evicted += policy.victims(1, 0.0)
        policy.stored([key], 0.0, NO_TRAITS, [0])
    assert evicted == ["C", "E", "F"]
