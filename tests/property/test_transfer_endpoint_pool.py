"""The endpoint pool against plain sets: caps, one holder at a time, one exit per endpoint."""

from __future__ import annotations

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, initialize, invariant, rule

from pinyon.transfer.links.endpoint_pool import EndpointPool
from tests.long import usually

KEYS = st.sampled_from("ab")
WHICH = st.integers(0, 11)


class PoolModel(RuleBasedStateMachine):
    @initialize(cap=st.integers(1, 6), cap_per_key=st.integers(1, 4))
    def build(self, cap: int, cap_per_key: int) -> None:
        self.pool: EndpointPool[str, int] = EndpointPool(cap, cap_per_key)
        self.now = 0.0
        self.made = 0
        self.key: dict[int, str] = {}
        self.idle: dict[int, float] = {}  # in the order of release
        self.used: set[int] = set()
        self.gone: set[int] = set()
        self.reserved: list[str] = []
        self.closed = False

    def count(self, key: str) -> int:
        return sum(self.key[one] == key for one in [*self.idle, *self.used]) + self.reserved.count(key)

    def exits(self, endpoints: list[int]) -> None:
        """Checks that each of these was idle and leaves now, for the first time."""
        assert len(set(endpoints)) == len(endpoints)
        for endpoint in endpoints:
            assert endpoint not in self.gone
            assert endpoint not in self.used
            del self.idle[endpoint]
            self.gone.add(endpoint)

    @rule(seconds=st.integers(0, 5))
    def wait(self, seconds: int) -> None:
        self.now += seconds

    @rule(key=KEYS)
    def lease(self, key: str) -> None:
        idle = [one for one in self.idle if self.key[one] == key]
        leased = self.pool.lease(key)
        assert leased == (idle[-1] if idle else None)
        if leased is not None:
            del self.idle[leased]
            self.used.add(leased)

    @rule(key=KEYS)
    def reserve(self, key: str) -> None:
        total = len(self.idle) + len(self.used) + len(self.reserved)
        evicted = self.pool.reserve(key)
        if self.closed:
            assert evicted is None
            return
        if self.count(key) >= self.pool.cap_per_key:
            candidates = {one for one in self.idle if self.key[one] == key}
        elif total >= self.pool.cap:
            candidates = set(self.idle)
        else:
            assert evicted == []
            self.reserved.append(key)
            return
        if not candidates:
            assert evicted is None
            return
        assert evicted is not None
        assert len(evicted) == 1
        assert evicted[0] in candidates
        self.exits(evicted)
        self.reserved.append(key)

    @rule(key=KEYS)
    def grow(self, key: str) -> None:
        self.reserve(key)
        self.make(-1, works=True)

    @rule(which=WHICH, works=st.booleans() | st.just(True))
    def make(self, which: int, works: bool) -> None:
        if not self.reserved:
            return
        key = self.reserved.pop(which % len(self.reserved))
        if not works:
            self.pool.cancel(key)
            return
        self.made += 1
        self.pool.add(key, self.made)
        self.key[self.made] = key
        self.used.add(self.made)

    @rule(which=WHICH)
    def release_what_is_not_in_use(self, which: int) -> None:
        endpoint = which % (self.made + 1)
        if endpoint not in self.used:
            with pytest.raises(ValueError, match="not in use"):
                self.pool.release(endpoint, self.now)

    @rule(which=WHICH)
    def release(self, which: int) -> None:
        if not self.used:
            return
        endpoint = sorted(self.used)[which % len(self.used)]
        self.used.remove(endpoint)
        assert self.pool.release(endpoint, self.now) is not self.closed
        if self.closed:
            self.gone.add(endpoint)
        else:
            self.idle[endpoint] = self.now

    @rule(which=WHICH)
    def discard(self, which: int) -> None:
        endpoint = 1 + which
        if endpoint > self.made:
            return
        assert self.pool.discard(endpoint) == (endpoint not in self.gone)
        self.gone.add(endpoint)
        self.used.discard(endpoint)
        self.idle.pop(endpoint, None)

    @rule(key=KEYS)
    def drop(self, key: str) -> None:
        dropped, used = self.pool.drop(lambda one: one == key)
        assert sorted(dropped) == sorted(one for one in self.idle if self.key[one] == key)
        self.exits(dropped)
        assert sorted(used) == sorted(one for one in self.used if self.key[one] == key)

    @rule(idle_s=st.integers(0, 6))
    def expire(self, idle_s: int) -> None:
        expired = self.pool.expire(self.now, idle_s)
        assert sorted(expired) == sorted(one for one, at in self.idle.items() if self.now - at >= idle_s)
        self.exits(expired)

    @rule()
    def close(self) -> None:
        if self.made < 8:
            return  # otherwise most runs would be spent on closed pools
        closed, _ = self.pool.drop(lambda key: True)
        self.pool.closed = True
        assert sorted(closed) == sorted(self.idle)
        self.exits(closed)
        self.closed = True  # endpoints in use, or being made, still come back

    @invariant()
    def books_agree(self) -> None:
        pool = self.pool
        assert pool.open + pool.reserved <= pool.cap
        assert pool.open == len(self.idle) + len(self.used)
        assert (pool.reserved, pool.closed) == (len(self.reserved), self.closed)
        assert all(self.count(key) <= pool.cap_per_key for key in "ab")
        assert not self.gone & (self.used | set(self.idle))

    def teardown(self) -> None:
        if not hasattr(self, "pool"):
            return
        for key in self.reserved:
            self.pool.cancel(key)
        self.reserved.clear()
        self.made = 8
        self.close()
        for endpoint in sorted(self.used):
            assert not self.pool.release(endpoint, self.now)
        assert self.pool.open == 0
        assert not self.pool._counts  # keys without an endpoint leave nothing
        assert not len(self.pool._sieve)


TestPoolModel = PoolModel.TestCase
TestPoolModel.settings = settings(max_examples=usually(20, long=120), stateful_step_count=50)


def fill(pool: EndpointPool[str, str], *endpoints: str) -> None:
    """Adds idle endpoints, whose key is their first letter."""
    for endpoint in endpoints:
        assert pool.reserve(endpoint[0]) == []
        pool.add(endpoint[0], endpoint)
        assert pool.release(endpoint, 0.0)


def test_the_most_recently_used_one_is_leased() -> None:
    pool: EndpointPool[str, str] = EndpointPool(3, 3)
    fill(pool, "a2", "a3", "a1")
    assert [pool.lease("a") for _ in range(4)] == ["a1", "a3", "a2", None]


def test_eviction_spares_what_was_used_again() -> None:
    pool: EndpointPool[str, str] = EndpointPool(3, 3)
    fill(pool, "a1", "b1", "c1")
    assert pool.lease("a") == "a1"
    assert pool.release("a1", 1.0)
    assert pool.reserve("d") == ["b1"]


def test_the_oldest_goes_unless_it_is_in_use() -> None:
    pool: EndpointPool[str, str] = EndpointPool(3, 3)
    fill(pool, "a1", "b1", "c1")
    assert pool.lease("a") == "a1"
    assert pool.reserve("d") == ["b1"]
    pool.add("d", "d1")
    assert pool.reserve("e") == ["c1"]
    pool.add("e", "e1")
    assert pool.reserve("f") is None
    assert pool.release("a1", 1.0)
    assert pool.reserve("f") == ["a1"]


def test_what_was_idle_for_long_enough_expires() -> None:
    pool: EndpointPool[str, str] = EndpointPool(4, 4)
    fill(pool, "a1", "a2", "a3", "b1")
    assert [pool.lease(key) for key in "aab"] == ["a3", "a2", "b1"]
    assert pool.release("a2", 4.0)
    assert pool.release("b1", 5.0)
    assert pool.expire(9.0, 5.0) == ["a1", "a2"]
    assert pool.open == 2
    assert pool.lease("b") == "b1"


def test_an_endpoint_of_a_full_key_replaces_an_idle_one_of_it() -> None:
    pool: EndpointPool[str, str] = EndpointPool(4, 2)
    fill(pool, "b1", "a1", "a2")
    assert pool.reserve("a") == ["a1"]
    assert pool.lease("a") == "a2"
    assert pool.reserve("a") is None
    assert pool.lease("b") == "b1"


def test_a_failed_path_is_dropped_but_a_new_endpoint_may_stay() -> None:
    pool: EndpointPool[str, str] = EndpointPool(4, 4)
    fill(pool, "a2", "a1")
    assert pool.lease("a") == "a1"
    assert pool.reserve("a") == []  # its making began before the path failed; if it succeeds, the path works
    assert pool.drop(lambda key: key == "a") == (["a2"], ["a1"])
    pool.add("a", "a3")
    assert pool.release("a3", 1.0)


@pytest.mark.parametrize("caps", [(0, 1), (1, 0)])
def test_caps_are_positive(caps: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match="positive"):
        EndpointPool(*caps)
