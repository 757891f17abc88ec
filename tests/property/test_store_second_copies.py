"""Second copies are evicted first, and never all copies: nodes that know each other by listings that lag."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.eviction import Lru
from pinyon.paging import LeaseTable
from pinyon.store.allocator import OffsetAllocator
from pinyon.store.objects import ObjectTable
from pinyon.store.records import NodeRecord, NodeRoom, Replica
from services.kvstore import second_copies
from services.kvstore.second_copies import SecondCopies
from tests.store_integrity import check_table

SIZE = 64
CAPACITY = 10 * SIZE
KEYS = [bytes([number]) * 16 for number in range(9)]


@dataclass
class FakeNode:
    node_id: str
    clock: Callable[[], float]
    spare: dict[bytes, float] = field(default_factory=dict)
    leaving: bool = False

    def __post_init__(self) -> None:
        self.table = ObjectTable(OffsetAllocator(CAPACITY), Lru(), LeaseTable(max_leases=100))

    def put(self, *keys: bytes, spare: bool = True) -> None:
        put_id, _ = self.table.put_start(keys, SIZE, self.clock(), 10.0)
        if put_id:
            self.table.close_put(put_id)
            self.table.end_put(put_id, commit=True, now_s=self.clock())
        self.spare.update(dict.fromkeys(keys, self.clock()) if spare else {})

    def evict(self, keys: Sequence[bytes]) -> int:
        return self.table.evict(keys, self.clock())


class FakePool:
    """Nodes, and what is listed of them, which changes only with :meth:`publish`."""

    def __init__(self, *names: str) -> None:
        self.now_s = 0.0
        self.nodes_by_id = {name: FakeNode(name, lambda: self.now_s) for name in names}
        self.listed: dict[str, dict[bytes, int]] = {name: {} for name in names}

    def publish(self, name: str) -> None:
        table = self.nodes_by_id[name].table
        self.listed[name] = {held.key: held.size for held in table.snapshot()[0]}

    def holders(self, key: bytes) -> set[str]:
        return {name for name, node in self.nodes_by_id.items() if key in node.table}

    async def nodes(self) -> list[NodeRecord]:
        await asyncio.sleep(0)
        return [
            NodeRecord(name, "0" * 32, "h:1", CAPACITY, room=NodeRoom(leaving=node.leaving))
            for name, node in self.nodes_by_id.items()
        ]

    async def locate(self, keys: Sequence[bytes], nodes: Sequence[NodeRecord]) -> list[list[Replica]]:
        found = [[Replica(n, size) for n in nodes if (size := self.listed[n.node_id].get(key))] for key in keys]
        await asyncio.sleep(0)
        return found

    def second_copies(self, name: str) -> SecondCopies:
        return SecondCopies(self.nodes_by_id[name], self, clock=lambda: self.now_s)  # type: ignore[arg-type]

    def make_room(self, *names: str) -> int:
        """Has these nodes make room at the same time; returns how many objects went."""

        async def all_of_them() -> int:
            them = [self.second_copies(name) for name in names]
            await asyncio.gather(*(each.make_room() for each in them))
            return sum(each.evicted for each in them)

        return asyncio.run(all_of_them())


def full_pool() -> FakePool:
    """Returns two full nodes, each with 5 objects of its own that are older than 5 which both have."""
    pool = FakePool("a", "b")
    for place, (name, node) in enumerate(pool.nodes_by_id.items()):
        node.put(*(bytes([100 + 10 * place + number]) * 16 for number in range(5)), spare=False)
        pool.publish(name)
    pool.now_s = 10.0
    for name, node in pool.nodes_by_id.items():
        node.put(*KEYS[:5])
        pool.publish(name)
    pool.now_s = 20.0
    return pool


def test_second_copies_go_while_older_last_ones_stay() -> None:
    pool = full_pool()
    assert pool.make_room("a", "b") == 2, "room for one put in each"
    assert all(pool.holders(key) for key in KEYS[:5])
    lone = sum(len(node.table) for node in pool.nodes_by_id.values()) - sum(len(pool.holders(k)) for k in KEYS[:5])
    assert lone == 10
    assert pool.make_room("a", "b") == 0, "there is room"


def test_hot_pinned_and_leased_copies_stay() -> None:
    pool = full_pool()
    pool.now_s = 19.0
    for node in pool.nodes_by_id.values():
        node.table.acquire(KEYS[:1], pool.now_s, 100.0)
        node.table.pin(KEYS[1:2], pool.now_s, 100.0)
        used = node.table.acquire(KEYS[2:5], pool.now_s, 100.0)
        node.table.release(used.lease_id, pool.now_s)
    assert pool.make_room("a", "b") == 0, "they were used a second ago"
    pool.now_s = 60.0
    assert pool.make_room("a", "b") >= 1
    assert all(pool.holders(key) == {"a", "b"} for key in KEYS[:2])


def test_a_node_that_is_to_leave_holds_no_copy() -> None:
    pool = full_pool()
    spare = dict(pool.nodes_by_id["b"].spare)
    pool.nodes_by_id["a"].leaving = True
    pool.now_s = 10.5
    assert pool.make_room("b") == 0
    assert pool.nodes_by_id["b"].spare == spare, "its copies may not be listed yet"
    pool.now_s = 20.0
    assert pool.make_room("b") == 0
    assert not pool.nodes_by_id["b"].spare, "what has no other copy is looked up once"


NAMES = ("a", "b", "c", "d")
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("put"), st.sampled_from(NAMES), st.sampled_from(KEYS)),
        st.tuples(st.just("publish"), st.sampled_from(NAMES)),
        st.tuples(st.just("make_room"), st.sets(st.sampled_from(NAMES), min_size=1)),
    ),
    max_size=60,
)


@settings(deadline=None, max_examples=100)
@given(STEPS)
def test_the_last_copy_never_goes_for_another(steps: list[Any]) -> None:
    """Nodes that always want room, and each have another object, the coldest."""
    pool = FakePool(*NAMES)
    stored: set[bytes] = set()
    for node in pool.nodes_by_id.values():
        node.put(bytes([200]) * 16, spare=False)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(second_copies, "WANTED_SHARE", 1.0)
        for step, *about in steps:
            pool.now_s += 100.0
            if step == "put":
                name, key = about
                if pool.nodes_by_id[name].table.used_bytes < CAPACITY:
                    pool.nodes_by_id[name].put(key)
                    stored.add(key)
            elif step == "publish":
                pool.publish(about[0])
            else:
                pool.make_room(*sorted(about[0]))
            assert all(pool.holders(key) for key in stored)
            for node in pool.nodes_by_id.values():
                check_table(node.table)
        pool.now_s *= 3
        for name in (*NAMES, *NAMES):
            for each in NAMES:
                pool.publish(each)
            pool.nodes_by_id[name].spare.update(dict.fromkeys(KEYS, 0.0))
            pool.make_room(name)
    assert all(len(pool.holders(key)) == 1 for key in stored)
