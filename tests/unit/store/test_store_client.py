"""The client's memory of nodes that failed: who answers but does not deliver is left alone like one who is silent."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.core.errors import DeadlineExceeded
from pinyon.store.client import PutOutcome, StoreClient
from pinyon.store.reader import BlockReader
from pinyon.store.records import NodeRecord, Replica
from pinyon.store.writer import WriteOutcome
from pinyon.transfer import TransferEngine
from tests.unit.store.block_holder import BLOCK, KEYS, OFFSETS, WAIT_S, Holder, serving


class OneNode:
    """Metadata that name one node for everything."""

    def __init__(self, address: str) -> None:
        self.node = NodeRecord("kv-0", "0" * 32, address)

    async def nodes(self) -> list[NodeRecord]:
        return [self.node]

    async def locate(self, keys: Sequence[bytes], nodes: Any = None) -> list[list[Replica]]:
        return [[Replica(self.node, BLOCK)] for _ in keys]

    async def close(self) -> None: ...


class Caller:
    def __init__(self, engine: TransferEngine, address: str) -> None:
        self.now = 0.0
        self.memory = bytearray(BLOCK * 8)
        self.region = engine.register_local_memory(self.memory)
        self.reader = BlockReader(engine)
        self.store = StoreClient(engine, OneNode(address), self.reader, clock=lambda: self.now)  # type: ignore[arg-type]

    async def get(self, timeout_s: float = WAIT_S) -> list[bool]:
        return await self.store.get(KEYS, self.region, OFFSETS, BLOCK, timeout_s)


@pytest.fixture
async def holder() -> AsyncIterator[Holder]:
    holder = Holder()
    yield holder
    holder.engine.close()


@pytest.fixture
async def caller(holder: Holder) -> AsyncIterator[Caller]:
    async with serving(holder) as address:
        engine = TransferEngine()
        engine.start()
        caller = Caller(engine, address)
        yield caller
        await caller.store.close()
        await caller.reader.close()
    engine.close()


def lead_nowhere(reply: kvstore_pb2.AcquireResponse) -> None:
    """The node answers, but its bytes cannot be had."""
    reply.segment.port = 9
    reply.segment.shm_address = "@pinyon-nobody"
    reply.segment.nics.clear()


async def test_a_node_whose_bytes_do_not_come_is_not_asked_until_its_pause_ends(holder: Holder, caller: Caller) -> None:
    holder.twist = lead_nowhere
    assert await caller.get() == [False] * 8
    assert len(holder.asked) == 1
    assert await caller.get() == [False] * 8
    assert len(holder.asked) == 1, "asked within its pause"
    caller.now = 0.5
    assert await caller.get() == [False] * 8
    assert len(holder.asked) == 2
    caller.now = 1.4
    assert await caller.get() == [False] * 8
    assert len(holder.asked) == 2, "the second pause is twice as long"
    caller.now = 1.5
    holder.twist = lambda reply: None
    assert await caller.get() == [True] * 8
    holder.twist = lead_nowhere
    await caller.get()
    caller.now = 2.0
    await caller.get()
    assert len(holder.asked) == 5, "a success ends the growth of pauses"


async def test_a_miss_is_no_failure(holder: Holder, caller: Caller) -> None:
    holder.twist = lambda reply: reply.Clear()
    for _ in range(3):
        assert await caller.get() == [False] * 8
    assert len(holder.asked) == 3


async def test_a_node_that_there_was_no_time_to_ask_is_neither_blamed_nor_trusted(
    holder: Holder, caller: Caller
) -> None:
    holder.twist = lead_nowhere
    await caller.get()
    caller.now = 0.5
    assert await caller.get(0.0) == [False] * 8
    assert len(holder.asked) == 1
    await caller.get()
    caller.now = 1.4
    await caller.get()
    assert len(holder.asked) == 2, "the second pause is twice as long"


async def test_a_node_that_is_offered_only_what_the_first_one_left_is_not_avoided(caller: Caller) -> None:
    first, second = (NodeRecord(f"kv-{name}", name * 32, f"{name}:1") for name in "12")
    asked: list[tuple[str, float]] = []

    class Writer:
        async def write(self, address: str, objects: Any, size: int, timeout_s: float, *_: Any) -> list[WriteOutcome]:
            asked.append((address, timeout_s))
            caller.now += timeout_s * 0.9
            if len(asked) % 2:
                return [WriteOutcome.FAILED] * len(objects)
            raise DeadlineExceeded("late")

    store: Any = caller.store
    writer, store._writer = store._writer, Writer()
    store._targets = lambda *_: [first, second]
    store.metadata.locate = no_replicas
    result = await caller.store.put([(KEYS[0], caller.region, 0)], BLOCK, 10.0)
    assert result.outcomes == (PutOutcome.FAILED,)
    assert [address for address, _ in asked] == [first.address, second.address]
    caller.now = 9.0
    assert store._usable([first, second]) == [second]
    store._writer = writer


async def no_replicas(keys: Sequence[bytes], nodes: Any = None) -> list[list[Replica]]:
    return [[] for _ in keys]
