"""A store node's objects under another eviction policy, which takes over what is known of them."""

from __future__ import annotations

from random import Random

from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.eviction import EVICTION_POLICIES, Traits, Use
from pinyon.paging import LeaseTable
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.kv_object import KvObject
from pinyon.store.objects import ObjectTable
from tests.property.test_eviction_reuse_hazard import Prompts
from tests.store_integrity import check_table

CAPACITY = 1 << 16
OBJECT = 64


def key_of(block: int) -> bytes:
    return block.to_bytes(16, "big")


class Node:
    """A table with room for all objects, and random calls to it."""

    def __init__(self, seed: int, policy: str) -> None:
        leases: LeaseTable[KvObject] = LeaseTable(max_leases=64)
        self.table = ObjectTable(OffsetAllocator(CAPACITY, OBJECT), EVICTION_POLICIES.make(policy), leases)
        self.rng = Random(seed)
        self.prompts = Prompts(self.rng)
        self.asked: list[tuple[list[bytes], Traits]] = []
        self.leases: list[int] = []
        self.now_s = 0.0

    def put(self) -> None:
        blocks, traits = self.prompts.next()
        keys = [key_of(block) for block in blocks]
        self.asked.append((keys, traits))
        put_id, _ = self.table.put_start(keys, OBJECT, self.now_s, 1.0, traits)
        if put_id:
            self.table.close_put(put_id)
            self.table.end_put(put_id, commit=True, now_s=self.now_s)

    def use(self) -> None:
        """Leases the beginning of a prompt for a while."""
        keys, traits = self.rng.choice(self.asked)
        lease = self.table.acquire(keys[: self.rng.randint(1, len(keys))], self.now_s, 1e9, use=Use(traits))
        self.leases.append(lease.lease_id)

    def release(self) -> None:
        self.table.release(self.leases.pop(self.rng.randrange(len(self.leases))), self.now_s)

    def some(self, count: int) -> None:
        for _ in range(count):
            self.now_s += self.rng.choice((0.0, 0.1, 3.0, 70.0))
            self.rng.choice((self.put, self.use, self.release if self.leases else self.use))()

    def switch(self, policy: str) -> None:
        self.table.switch(EVICTION_POLICIES.make(policy), self.now_s)

    def order(self) -> list[bytes]:
        """Returns the order in which all objects would be evicted, once nothing reads them."""
        while self.leases:
            self.release()
        check_table(self.table)
        return self.table.eviction.victims(len(self.table), self.now_s + self.rng.choice((0.0, 500.0)))


@settings(max_examples=60, deadline=None)
@given(
    st.integers(0, 1 << 32),
    st.lists(st.sampled_from(EVICTION_POLICIES.names), min_size=1, max_size=3),
    st.sampled_from((0, 1, 12)),
)
def test_after_a_switch_nothing_goes_before_what_extends_it(seed: int, policies: list[str], later: int) -> None:
    """The order holds after any earlier policy, and after any uses in between."""
    node = Node(seed, policies[0])
    node.put()
    for policy in (*policies[1:], "reuse_hazard"):
        node.some(20)
        node.switch(policy)
    for _ in range(later):
        node.use()
        node.now_s += 30.0
    order = node.order()
    assert len(order) == len(node.table)
    went = {key: number for number, key in enumerate(order)}
    for block, before in node.prompts.before.items():
        if before is not None:
            assert went[key_of(block)] < went[key_of(before)], f"{before} went before {block}"
