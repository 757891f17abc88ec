"""Who has to go when all places of sessions that nobody knows are taken."""

from __future__ import annotations

import random
from collections import Counter

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.frontdoor.regions.strangers import Stranger, Strangers, address_of

LIMIT = 8


class Crowd:
    def __init__(self, seed: int) -> None:
        self.places = Strangers(LIMIT, random.Random(seed))
        self.here: dict[int, Stranger] = {}
        self.evicted: list[int] = []
        self._last = 0

    def enter(self, address: str) -> int:
        self._last = number = self._last + 1
        self.here[number] = self.places.enter(address, lambda: self._evict(number))
        return number

    def _evict(self, number: int) -> None:
        self.here.pop(number).leave()  # as a session does when it has ended
        self.evicted.append(number)

    def leave(self, number: int) -> None:
        self.here.pop(number).leave()

    def counts(self) -> Counter[str]:
        return Counter(each.address for each in self.here.values())


@given(st.integers(0, 2**32), st.lists(st.tuples(st.booleans(), st.integers(0, 4)), max_size=60))
def test_there_is_always_a_place_and_the_largest_crowd_makes_room(seed, steps):
    crowd = Crowd(seed)
    for enters, number in steps:
        before, gone = crowd.counts(), len(crowd.evicted)
        if enters:
            known = {key: each.address for key, each in crowd.here.items()}
            crowd.enter(f"10.0.0.{number}")
            assert len(crowd.evicted) - gone == (before.total() == LIMIT)
            for each in crowd.evicted[gone:]:
                assert before[known[each]] == max(before.values())
        elif crowd.here:
            crowd.leave(sorted(crowd.here)[number % len(crowd.here)])
        assert len(crowd.places) == len(crowd.here) <= LIMIT


def test_who_comes_from_elsewhere_is_never_pushed_out_by_one_address():
    crowd = Crowd(1)
    ours = crowd.enter("10.0.0.1")
    for _ in range(1000):
        crowd.enter("10.0.0.2")
    assert ours in crowd.here
    crowd.leave(ours)


def test_who_shares_the_strangers_address_mostly_stays_for_a_few_of_his_sessions():
    stayed = 0
    for seed in range(200):
        crowd = Crowd(seed)
        for _ in range(LIMIT):
            crowd.enter("10.0.0.2")
        ours = crowd.enter("10.0.0.2")
        crowd.enter("10.0.0.2")
        stayed += ours in crowd.here
    assert stayed > 150


@pytest.mark.parametrize(
    ("peer", "address"),
    [
        ("ipv4:10.0.0.1:5", "10.0.0.1"),
        ("ipv6:%5B::1%5D:5", "::/64"),
        ("ipv6:[2001:db8::7]:5", "2001:db8::/64"),
        ("ipv6:%5B::ffff:10.0.0.1%5D:5", "10.0.0.1"),
        ("unix:", "unix"),
    ],
)
def test_addresses(peer, address):
    assert address_of(peer) == address
