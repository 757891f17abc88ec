"""The client's memory of failed nodes and of a failed Redis, and how a small block comes."""

from __future__ import annotations

from collections.abc import AsyncIterator, Sequence
from typing import Any

import pytest

from pinyon.core.errors import DeadlineExceeded, PinyonError, Unavailable
from pinyon.store.client import StoreClient
from pinyon.store.kv_memory import KvMemory
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import BlockReader
from pinyon.store.records import NodeRecord, Replica
from pinyon.store.writer import PutOutcome
from pinyon.transfer import TransferEngine
from tests.unit.store.block_holder import BLOCK, KEYS, PATIENT, WAIT_S, Holder, serving


class OneNode:
    """Metadata that name one node for every key, or the ``nodes`` that hold nothing."""

    def __init__(self, address: str, nodes: Sequence[NodeRecord] = ()) -> None:
        self.holders = [] if nodes else [NodeRecord("kv-0", "0" * 32, address)]
        self.live = [*self.holders, *nodes]
        self.asked = 0
        self.error: PinyonError | None = None

    async def nodes(self) -> list[NodeRecord]:
        self.asked += 1
        if self.error is not None:
            raise self.error
        return self.live

    async def locate(self, keys: Sequence[bytes], nodes: Any = None) -> list[list[Replica]]:
        return [[Replica(node, BLOCK) for node in self.holders] for _ in keys]

    async def close(self) -> None: ...


class Caller:
    def __init__(self, engine: TransferEngine, address: str, nodes: Sequence[NodeRecord] = ()) -> None:
        self.now = 0.0
        self.engine = engine
        self.metadata = OneNode(address, nodes)
        self.memory = bytearray(BLOCK * 8)
        self.region = engine.register_local_memory(self.memory)
        self.kv = KvMemory.whole(self.region, BLOCK)
        self.channels = NodeChannels()
        self.reader = BlockReader(engine, self.channels)
        self.store = StoreClient(engine, self.metadata, self.channels, clock=lambda: self.now)  # type: ignore[arg-type]


@pytest.fixture
async def holder() -> AsyncIterator[Holder]:
    holder = Holder()
    yield holder
    holder.engine.close()


@pytest.fixture
async def caller(holder: Holder) -> AsyncIterator[Caller]:
    async with serving(holder) as address:
        engine = TransferEngine(limits=PATIENT)
        engine.start()
        caller = Caller(engine, address)
        yield caller
        await caller.store.close()
        await caller.reader.close()
        await caller.channels.close()
    engine.close()


async def test_a_small_block_is_fetched_without_a_thread_over_a_link(holder: Holder, caller: Caller) -> None:
    async def read() -> int:
        ((node, _),) = await caller.store.leading(KEYS[3:4], BLOCK, WAIT_S)
        read = await caller.reader.read(node.address, KEYS[3:4], [caller.kv.pieces(0)], BLOCK, WAIT_S)
        return read.leading

    assert await read() == 1
    first = sum(path.short for path in caller.engine.stats().paths)
    assert await read() == 1
    assert caller.memory[:BLOCK] == holder.memory[3 * BLOCK : 4 * BLOCK]
    assert sum(path.short for path in caller.engine.stats().paths) - first == 1


class Writer:
    """A stand-in for the client's own writer: two nodes take a share of the time that they are given, then fail."""

    def __init__(self, caller: Caller, share: float) -> None:
        self.caller = caller
        self.share = share
        self.asked: list[tuple[str, float]] = []

    async def write(self, address: str, objects: Any, size: int, timeout_s: float, *_: Any) -> list[PutOutcome]:
        self.asked.append((address, timeout_s))
        self.caller.now += timeout_s * self.share
        if len(self.asked) % 2:
            return [PutOutcome.FAILED] * len(objects)
        raise DeadlineExceeded("late")


async def two_nodes(share: float) -> tuple[Caller, Writer]:
    caller = Caller(TransferEngine(), "", [NodeRecord(f"kv-{name}", name * 32, f"{name}:1") for name in "12"])
    writer = Writer(caller, share)
    store: Any = caller.store
    store._writer = writer
    result = await caller.store.put([(KEYS[0], caller.kv.pieces(0))], BLOCK, 10.0)
    assert result == (PutOutcome.FAILED,)
    return caller, writer


async def test_a_hanging_node_leaves_the_next_one_its_share_of_time() -> None:
    caller, writer = await two_nodes(share=1.0)
    assert sorted(address for address, _ in writer.asked) == ["1:1", "2:1"]
    assert [timeout_s for _, timeout_s in writer.asked] == [5.0, 5.0]
    caller.now = 5.4  # the pause of the first node ends at 5.5 s
    await caller.store.put([(KEYS[0], caller.kv.pieces(0))], BLOCK, 10.0)
    assert len(writer.asked) == 2, "both are left alone"


async def test_a_node_offered_only_leftover_time_is_not_avoided() -> None:
    caller, writer = await two_nodes(share=1.8)
    (_, first_s), (second, second_s) = writer.asked
    assert (first_s, second_s) == (5.0, 1.0)
    caller.now = 9.0
    await caller.store.put([(KEYS[1], caller.kv.pieces(0))], BLOCK, 10.0)
    assert [address for address, _ in writer.asked[2:]] == [second]


async def test_a_failed_redis_is_left_alone_for_a_moment_then_asked() -> None:
    caller = Caller(TransferEngine(), "", [NodeRecord("kv-1", "1" * 32, "1:1")])
    caller.metadata.error = Unavailable("Redis: TimeoutError")
    asked_s = []
    for step in range(100):  # each step takes a tenth of a second
        caller.now = step / 10
        before = caller.metadata.asked
        with pytest.raises(Unavailable):
            await caller.store.leading(KEYS, BLOCK, WAIT_S)
        if caller.metadata.asked > before:
            asked_s.append(caller.now)
    assert asked_s == pytest.approx([0.0, 0.3, 0.8, 1.8, 3.8, 5.8, 7.8, 9.8])
    caller.metadata.error = None
    caller.now += 2.0
    assert await caller.store.leading(KEYS, BLOCK, WAIT_S) == []
    assert await caller.store.nodes() == caller.metadata.live


async def test_a_key_given_twice_is_stored_only_if_the_first_one_is() -> None:
    caller, _ = await two_nodes(share=0.0)
    caller.now = 10.0
    objects = [(key, caller.kv.pieces(0)) for key in (KEYS[0], KEYS[1], KEYS[0])]
    result = await caller.store.put(objects, BLOCK, 10.0)
    assert result == (PutOutcome.FAILED,) * 3
