"""The block pool against a model that is too simple to be wrong: sets, lists and no shortcuts."""

from __future__ import annotations

from collections import Counter

import pytest
from hypothesis import settings
from hypothesis import strategies as st
from hypothesis.stateful import RuleBasedStateMachine, invariant, rule

from pinyon.eviction import EVICTION_POLICIES, Lru
from pinyon.paging import BlockPool, KeyChanges
from tests.long import usually
from tests.worker_integrity import check_pool

BLOCKS = 6
KEYS = [bytes([n]) * 16 for n in range(8)]
key_lists = st.lists(st.sampled_from(KEYS), max_size=5)


class PoolMachine(RuleBasedStateMachine):
    policy = "lru"

    def __init__(self) -> None:
        super().__init__()
        self.pool = BlockPool(BLOCKS, EVICTION_POLICIES.make(self.policy), spares=True)
        self.ordered = self.policy == "lru"
        """True if the policy is LRU, has been told of everything, and nothing was ever wanted."""
        self.wants: list[list[bytes]] = []
        self.evicted = 0
        self.held: Counter[int] = Counter()  # block → references this test holds
        self.keyed: dict[bytes, int] = {}
        self.cached: list[bytes] = []  # oldest first
        self.told: set[bytes] = set()  # what a listener believes

    @rule(count=st.integers(0, BLOCKS + 1))
    def allocate(self, count: int) -> None:
        free = BLOCKS - len(set(+self.held)) - len(self.cached)
        blocks = self.pool.allocate(count)
        if count > free + len(self.cached):
            assert blocks is None
            return
        assert blocks is not None
        assert len(blocks) == len(set(blocks)) == count
        assert not any(self.held[block] for block in blocks)
        victims = sorted(set(self.keyed) - set(self.pool.keys()), key=self.cached.index)
        assert len(victims) == max(0, count - free)
        wanted = {key for keys in self.wants for key in keys}
        if wanted & set(victims):
            assert set(self.cached) - set(victims) <= wanted, "what is wanted goes last"
        if self.ordered:
            assert victims == self.cached[: len(victims)]
        for key in victims:
            self.cached.remove(key)
            del self.keyed[key]
        self.evicted += len(victims)
        assert not set(blocks) & set(self.keyed.values())
        self.held.update(blocks)

    @rule(data=st.data(), key=st.sampled_from(KEYS))
    def publish(self, data: st.DataObject, key: bytes) -> None:
        unkeyed = sorted(set(+self.held) - set(self.keyed.values()))
        if not unkeyed:
            return
        block = data.draw(st.sampled_from(unkeyed))
        assert self.pool.publish_all([block], [key]) == [0] * (self.keyed.setdefault(key, block) != block)

    @rule(data=st.data(), keys=key_lists)
    def publish_all(self, data: st.DataObject, keys: list[bytes]) -> None:
        """Publishes a run of blocks, with keys that others hold already or that come twice."""
        unkeyed = sorted(set(+self.held) - set(self.keyed.values()))
        blocks = data.draw(st.permutations(unkeyed))[: len(keys)]
        held = self.pool.publish_all(blocks, keys[: len(blocks)], first=3)
        pairs = enumerate(zip(blocks, keys, strict=False))
        assert held == [index for index, (block, key) in pairs if self.keyed.setdefault(key, block) != block]

    @rule(keys=key_lists, allow_gaps=st.booleans())
    def acquire(self, keys: list[bytes], allow_gaps: bool) -> None:
        expected = []
        for index, key in enumerate(keys):
            if key in self.keyed:
                expected.append((index, self.keyed[key]))
            elif not allow_gaps:
                break
        if not allow_gaps:
            assert self.pool.match_prefix(keys) == len(expected)
        assert self.pool.acquire(keys, allow_gaps=allow_gaps) == expected
        for index, block in expected:
            self.held[block] += 1
            if keys[index] in self.cached:
                self.cached.remove(keys[index])

    @rule(data=st.data())
    def release(self, data: st.DataObject) -> None:
        blocks = sorted(self.held.elements())
        if not blocks:
            return
        given = data.draw(st.lists(st.sampled_from(blocks), unique=True, min_size=1))
        self.pool.release(given)
        self.held.subtract(given)
        names = {block: key for key, block in self.keyed.items()}
        self.cached += [names[block] for block in reversed(given) if not self.held[block] and block in names]

    @rule(key=st.sampled_from(KEYS))
    def remove(self, key: bytes) -> None:
        assert self.pool.remove(key) == (key in self.keyed)
        self.keyed.pop(key, None)
        if key in self.cached:
            self.cached.remove(key)

    @rule(keys=key_lists)
    def want(self, keys: list[bytes]) -> None:
        keys = list(dict.fromkeys(keys))
        count = self.pool.want(keys)
        assert count <= self.pool.match_prefix(keys)
        self.wants.append(keys[:count])
        wanted = {key for keys in self.wants for key in keys}
        assert len(wanted) == self.pool.eviction.wanted <= BLOCKS // 2
        assert count == self.pool.match_prefix(keys) or len(wanted) == BLOCKS // 2
        self.ordered = False

    @rule(data=st.data())
    def unwant(self, data: st.DataObject) -> None:
        if self.wants:
            self.pool.unwant(self.wants.pop(data.draw(st.integers(0, len(self.wants) - 1))))

    @rule(policy=st.sampled_from(EVICTION_POLICIES.names))
    def switch(self, policy: str) -> None:
        """Switches the policy: nothing is lost, and LRU after LRU keeps its order."""
        self.pool.switch(EVICTION_POLICIES.make(policy), 0.0)
        self.ordered = self.ordered and policy == "lru"

    @rule()
    def listen(self) -> None:
        stored, removed = self.pool.drain_changes()
        assert not self.told & set(stored)
        assert self.told >= set(removed)
        self.told = (self.told | set(stored)) - set(removed)
        assert self.told == set(self.keyed)

    @invariant()
    def books_balance(self) -> None:
        check_pool(self.pool)
        assert set(self.pool.keys()) == set(self.keyed)
        assert self.pool.used == len(set(+self.held))
        assert self.pool.cached == len(self.cached)
        assert self.pool.eviction.evicted == self.evicted
        assert self.pool.free + self.pool.used + self.pool.cached == self.pool.total == BLOCKS


for name in EVICTION_POLICIES.names:
    case = type(f"PoolMachine_{name}", (PoolMachine,), {"policy": name}).TestCase
    case.settings = settings(max_examples=usually(20, long=60), stateful_step_count=40)
    globals()[f"TestBlockPool_{name}"] = case
del case  # otherwise it would be collected twice


def pool_with(keys: list[bytes], blocks: int = 4) -> BlockPool:
    pool = BlockPool(blocks, Lru())
    taken = pool.allocate(len(keys))
    assert taken is not None
    assert pool.publish_all(taken, keys) == []
    pool.release(taken)
    return pool


def test_the_end_of_a_prompt_is_evicted_before_its_start() -> None:
    pool = pool_with(KEYS[:4])
    pool.allocate(2)
    assert pool.match_prefix(KEYS[:4]) == 2


def test_misuse_is_refused_and_changes_nothing() -> None:
    pool = pool_with(KEYS[:2])
    (_, block), _ = pool.acquire(KEYS[:2])
    with pytest.raises(ValueError, match="holds another key"):
        pool.publish_all([block], KEYS[5:6])
    assert KEYS[5] not in pool
    with pytest.raises(ValueError, match="not in use"):
        pool.publish_all([3], KEYS[5:6])
    pool.release([block])
    with pytest.raises(ValueError, match="not in use"):
        pool.release([block])
    with pytest.raises(ValueError, match="negative"):
        pool.allocate(-1)
    with pytest.raises(ValueError, match="positive"):
        BlockPool(0, Lru())
    check_pool(pool)


def test_changes_are_net() -> None:
    changes = KeyChanges()
    changes.add(b"came and went")
    changes.remove(b"came and went")
    changes.remove(b"went and came")
    changes.add(b"went and came")
    changes.remove(b"gone")
    changes.add(b"new")
    assert changes
    assert changes.drain() == ([b"new"], [b"gone"])
    assert not changes
