"""Blocks of one engine's memory that another one reads, over real sockets."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest

from pinyon.api.kvstore.v1 import kvstore_pb2
from pinyon.core.errors import InvalidArgument
from pinyon.messages.segment import segment_from_proto
from pinyon.runtime.callers import BLOCK_READ_CALLERS
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import BlockReader, ReadResult
from pinyon.transfer import Opcode, TransferEngine, TransferRequest
from pinyon.vllm.lending import Lending
from tests.unit.vllm.layered import BLOCKS, LENGTH, LayeredMemory
from tests.waiting import eventually

KEYS = [bytes([number]) * 15 + bytes([number]) for number in range(1, BLOCKS)]
WAIT_S = 30.0


class Pair:
    """A lender with two storages and padded blocks, and a reader with one."""

    def __init__(self) -> None:
        self.now_s = 0.0
        self.lender, self.borrower = TransferEngine(), TransferEngine()
        self.lender.start()
        self.borrower.start()
        self.theirs, self.ours = LayeredMemory(self.lender, 2, pad=64), LayeredMemory(self.borrower)
        self.lending = Lending(self.lender, self.theirs, 5.0, 30.0, lambda: self.now_s)  # type: ignore[arg-type]
        self.server = GrpcServer("127.0.0.1:0", None)
        service = kvstore_pb2.DESCRIPTOR.services_by_name["BlockReadService"]
        self.server.add(self.lending, service, BLOCK_READ_CALLERS)
        self.channels = NodeChannels()
        self.reader = BlockReader(self.borrower, self.channels)
        self.address = ""
        self.contents = [self.theirs.write(block, block) for block in range(BLOCKS)]

    def fill(self, *blocks: int) -> None:
        self.lending.filled(self.lending.promised([(KEYS[block - 1], block) for block in blocks]))

    async def read(self, *blocks: int) -> ReadResult:
        """Reads the keys of these blocks into the reader's blocks from 0 on."""
        keys, places = [KEYS[block - 1] for block in blocks], [self.ours.kv.pieces(at) for at in range(len(blocks))]
        return await self.reader.read(self.address, keys, places, self.ours.kv.object_bytes, WAIT_S)

    async def acquire(self, *blocks: int) -> kvstore_pb2.AcquireResponse:
        request = kvstore_pb2.AcquireRequest(keys=b"".join(KEYS[block - 1] for block in blocks), lease_ms=20_000)
        return await self.lending.Acquire(request, None)

    async def take(self, reply: kvstore_pb2.AcquireResponse) -> bool:
        """Reads the first layer of the first leased block by the lease's key; returns whether it is allowed."""
        segment = segment_from_proto(reply.segment)
        place, block = reply.layers[0], reply.blocks[0].offset_bytes
        at = place.base_bytes + block * place.stride_bytes
        request = TransferRequest(
            Opcode.READ, self.ours.regions[0].key, 0, segment, segment.regions[place.region].key, at, LENGTH
        )
        (result,) = await self.borrower.transfer_async([request])
        return result.ok


@pytest.fixture
async def pair() -> AsyncIterator[Pair]:
    pair = Pair()
    pair.address = await pair.server.start()
    yield pair
    await pair.reader.close()
    await pair.channels.close()
    await pair.server.drain(0)
    await asyncio.to_thread(pair.lender.close)
    await asyncio.to_thread(pair.borrower.close)


async def test_blocks_are_read_layer_by_layer_into_other_strides(pair: Pair) -> None:
    pair.fill(1, 2, 5)
    assert await pair.read(5, 1, 2) == ReadResult(3, worked=True)
    assert [pair.ours.read(at) for at in range(3)] == [pair.contents[block] for block in (5, 1, 2)]
    assert await pair.read(1, 3, 2) == ReadResult(1, worked=True), "up to the first that is not held"
    await eventually(lambda: not len(pair.lending), "the leases are released")


async def test_a_lease_ends_when_its_block_gets_new_content(pair: Pair) -> None:
    pair.fill(1, 2)
    lease, other = await pair.acquire(1), await pair.acquire(2)
    assert await pair.take(lease)
    await asyncio.to_thread(pair.lending.overwritten, [1])
    assert not await pair.take(lease)
    assert await pair.take(other)
    assert await pair.read(1) == ReadResult(0, worked=True)
    released = await pair.lending.Release(kvstore_pb2.ReleaseRequest(lease_id=lease.lease_id), None)
    assert not released.released
    assert len(pair.lending) == 1


async def test_content_that_is_overwritten_while_computed_is_not_lent(pair: Pair) -> None:
    batch = pair.lending.promised([(KEYS[0], 1), (KEYS[1], 2)])
    assert (await pair.read(1)).leading == 0, "it is not there yet"
    pair.lending.overwritten([1])
    pair.lending.filled(batch)
    assert (await pair.read(1)).leading == 0
    assert (await pair.read(2)).leading == 1


async def test_a_lease_ends_by_time_if_it_is_not_released(pair: Pair) -> None:
    pair.fill(1)
    lease = await pair.acquire(1)
    assert len(pair.lending) == 1
    pair.now_s = 21.0
    assert await pair.acquire(3) == kvstore_pb2.AcquireResponse()
    assert not len(pair.lending)
    assert not await pair.take(lease)


async def test_a_renewed_lease_ends_later(pair: Pair) -> None:
    pair.fill(1)
    lease = await pair.acquire(1)
    pair.now_s = 19.0
    request = kvstore_pb2.RenewRequest(lease_id=lease.lease_id, lease_ms=5_000)
    assert (await pair.lending.Renew(request, None)).lease_ms == 5_000
    pair.now_s = 21.0
    await pair.acquire(3)  # what is overdue ends
    assert len(pair.lending) == 1
    assert await pair.take(lease)
    pair.now_s = 25.0
    assert (await pair.lending.Renew(request, None)).lease_ms == 0, "it is over"
    await pair.acquire(3)
    assert not len(pair.lending)
    assert not await pair.take(lease)
    assert (await pair.lending.Renew(request, None)).lease_ms == 0


async def test_a_lease_that_ends_while_it_is_made_opens_nothing(pair: Pair, monkeypatch: pytest.MonkeyPatch) -> None:
    pair.fill(1, 2)
    grant = pair.lender.grant

    def late(*arguments: Any, **named: Any) -> Any:
        pair.lending.overwritten([1])  # by the engine's thread, meanwhile
        return grant(*arguments, **named)

    monkeypatch.setattr(pair.lender, "grant", late)
    assert await pair.acquire(1) == kvstore_pb2.AcquireResponse()
    assert not len(pair.lending)
    assert pair.lender.stats().grants_now == 0
    with pytest.raises(InvalidArgument):
        await pair.acquire(2, 2)


async def test_new_weights_end_all_that_was_lent(pair: Pair) -> None:
    pair.fill(1, 2)
    pair.lending.promised([(KEYS[3], 4)])
    lease = await pair.acquire(1, 2)
    pair.lending.forget()
    assert not await pair.take(lease)
    assert (await pair.read(2)).leading == 0
