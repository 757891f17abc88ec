"""SIEVE against a list: the paper's definition, written again as plainly as possible."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pinyon.core.sieve import Sieve
from tests.long import usually

KEYS = st.integers(0, 9)


class NaiveSieve:
    """A queue with its head at index 0. ``hand`` is an object, or None for "begin at the tail"."""

    def __init__(self) -> None:
        self.queue: list[int] = []
        self.visited: set[int] = set()
        self.hand: int | None = None

    def before(self, key: int) -> int | None:
        """Returns the neighbour towards the head."""
        index = self.queue.index(key)
        return self.queue[index - 1] if index else None

    def remove(self, key: int) -> None:
        if self.hand == key:
            self.hand = self.before(key)
        self.queue.remove(key)
        self.visited.discard(key)

    def evict(self, busy: set[int]) -> int | None:
        if set(self.queue) <= busy:
            return None
        while True:
            here = self.queue[-1] if self.hand is None else self.hand
            if here not in busy and here not in self.visited:
                self.remove(here)
                return here
            if here not in busy:
                self.visited.discard(here)
            self.hand = self.before(here)


class SieveModel(RuleBasedStateMachine):
    def __init__(self) -> None:
        super().__init__()
        self.sieve: Sieve[int] = Sieve()
        self.model = NaiveSieve()

    @rule(key=KEYS)
    def request(self, key: int) -> None:
        if key in self.model.queue:
            self.sieve.touch(key)
            self.model.visited.add(key)
        else:
            self.sieve.insert(key)
            self.model.queue.insert(0, key)

    @rule(key=KEYS)
    def remove(self, key: int) -> None:
        if key in self.model.queue:
            self.sieve.remove(key)
            self.model.remove(key)
        else:
            with pytest.raises(KeyError):
                self.sieve.remove(key)
            with pytest.raises(KeyError):
                self.sieve.touch(key)

    @rule(key=KEYS)
    def insert_twice(self, key: int) -> None:
        if key in self.model.queue:
            with pytest.raises(ValueError, match="already"):
                self.sieve.insert(key)

    @rule(busy=st.sets(KEYS))
    def evict(self, busy: set[int]) -> None:
        asked: list[int] = []

        def evictable(key: int) -> bool:
            asked.append(key)
            return key not in busy

        size = len(self.sieve)
        assert self.sieve.evict(evictable) == self.model.evict(busy)
        assert len(asked) <= 2 * size

    @rule()
    def evict_any(self) -> None:
        assert self.sieve.evict() == self.model.evict(set())

    @invariant()
    def same_queue(self) -> None:
        assert list(self.sieve) == self.model.queue
        assert len(self.sieve) == len(self.model.queue)
        assert all((key in self.sieve) == (key in self.model.queue) for key in range(10))


TestSieveModel = SieveModel.TestCase
TestSieveModel.settings = settings(max_examples=usually(20, long=120), stateful_step_count=50)


def test_the_papers_illustration() -> None:
    """The queue has seven places; A, B and G were visited; requests for H, A, D, I, B, J then evict C, E and F."""
    sieve: Sieve[str] = Sieve()
    evicted = []
    for key in "AABBCDEFGG" + "HADIBJ":
        if key in sieve:
            sieve.touch(key)
            continue
        if len(sieve) == 7:
            evicted.append(sieve.evict())
        sieve.insert(key)
    assert evicted == ["C", "E", "F"]
    assert "".join(sieve) == "JIHGDBA"


def test_the_hand_stays_where_an_object_was_removed() -> None:
    sieve: Sieve[str] = Sieve()
    for key in "ABCDE":
        sieve.insert(key)
    assert sieve.evict() == "A"  # the hand is at B now
    sieve.remove("B")
    sieve.insert("F")
    assert [sieve.evict() for _ in range(4)] == ["C", "D", "E", "F"]
    assert sieve.evict() is None


def test_what_is_in_use_keeps_its_bit() -> None:
    sieve: Sieve[str] = Sieve()
    for key in "ABC":
        sieve.insert(key)
        sieve.touch(key)
    assert sieve.evict(lambda key: key == "B") == "B"
    sieve.insert("D")
    assert sieve.evict() == "D"  # C and A had kept their bits; the hand began at C and passed D without a bit
