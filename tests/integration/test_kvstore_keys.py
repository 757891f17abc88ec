"""The keys of a store node: a put may write its own range, a reader may read what it leased, both until their end."""

from __future__ import annotations

import asyncio
import secrets
import socket
from collections.abc import Sequence
from typing import Any

import pytest

from pinyon.messages.segment import segment_from_proto
from pinyon.store.kv_memory import KvMemory
from pinyon.store.reader import ReadResult
from pinyon.store.writer import PutOutcome
from pinyon.transfer import Opcode, Reason, TransferRequest, TransferResult
from pinyon.transfer.links import handshake
from pinyon.transfer.transports.tcp import wire
from tests.integration.kvstore_parts import (
    OBJECT,
    Client,
    Node,
    acquire,
    client_of,
    content,
    end,
    key,
    release,
    running_node,
    start,
)
from tests.waiting import WAIT_S, eventually

TRANSPORTS = pytest.mark.parametrize("transports", ["tcp", "shm,tcp"])


@TRANSPORTS
async def test_a_put_reaches_its_own_range_only_and_not_what_lay_there(redis_url: str, transports: str) -> None:
    async with running_node(redis_url) as node, client_of(redis_url, transfer_transports=transports) as client:
        await client.stored([0, 1])
        lease = await acquire(node, 0, 1)
        theirs = [block.offset_bytes for block in lease.blocks]
        mine, other = await start(node, 7), await start(node, 8)
        (at,), (beside,) = ([slot.offset_bytes for slot in put.slots] for put in (mine, other))
        client.memory[:] = b"\xbb" * len(client.memory)
        for offset in (*theirs, beside, at + 1, at - 1):
            result = await client.move(Opcode.WRITE, mine, offset)
            assert result.reason is Reason.OUT_OF_RANGE, f"written at {offset}"
        assert (await client.move(Opcode.READ, mine, at)).reason is Reason.ACCESS_DENIED
        assert (await client.move(Opcode.WRITE, mine, at)).ok
        assert (await end(node, mine, commit=True)).committed == 1
        client.memory[:] = b"\xcc" * len(client.memory)
        assert (await client.move(Opcode.WRITE, mine, at)).reason is Reason.UNKNOWN_REGION, "it can be read now"
        await end(node, other)
        assert (await client.move(Opcode.WRITE, other, beside)).reason is Reason.UNKNOWN_REGION, "given up"
        assert await release(node, lease)
        await client.until_listed([0, 1])
        assert await client.get([0, 1]) == [True, True]
        seven = await acquire(node, 7)
        assert (await client.move(Opcode.READ, seven, at)).ok
        assert client.slot(0) == b"\xbb" * OBJECT
        assert await release(node, seven)
        assert node.nothing_is_left()


@TRANSPORTS
async def test_a_readers_key_is_for_its_lease_and_dies_with_it(redis_url: str, transports: str) -> None:
    async with running_node(redis_url) as node, client_of(redis_url, transfer_transports=transports) as client:
        await client.stored([0, 1, 2])
        every = await acquire(node, 0, 1, 2)
        first, third = await acquire(node, 0), await acquire(node, 2, 77)
        offsets = [block.offset_bytes for block in every.blocks]
        assert len({reply.segment.regions[0].key for reply in (every, first, third)}) == 3
        client.memory[:] = bytes(len(client.memory))
        for at in offsets[1:]:
            assert (await client.move(Opcode.READ, first, at)).reason is Reason.OUT_OF_RANGE
        assert (await client.move(Opcode.READ, first, offsets[0], OBJECT + 1)).reason is Reason.OUT_OF_RANGE
        assert (await client.move(Opcode.WRITE, first, offsets[0])).reason is Reason.ACCESS_DENIED
        assert not any(client.memory)
        assert (await client.move(Opcode.READ, first, offsets[0])).ok
        assert client.slot(0) == content(0)
        client.memory[:] = bytes(len(client.memory))
        assert await release(node, first)
        assert not await release(node, first)
        assert (await client.move(Opcode.READ, first, offsets[0])).reason is Reason.UNKNOWN_REGION
        assert not any(client.memory), "although others may still read it"
        assert (await client.move(Opcode.READ, every, offsets[0])).ok
        assert await release(node, every)
        assert (await client.move(Opcode.READ, third, offsets[2])).ok
        assert client.slot(0) == content(2)
        assert await release(node, third)
        assert node.nothing_is_left()


async def test_a_key_of_a_lease_that_ran_out_never_reads_later_content(redis_url: str) -> None:
    async with running_node(redis_url, lease_max_s=0.05) as node, client_of(redis_url) as client:
        await client.stored([0])
        stale = await acquire(node, 0)
        (block,) = stale.blocks
        await eventually(node.nothing_is_left, "the lease is over")
        await client.remove([0])
        await client.stored([9])
        again = await acquire(node, 9)
        assert again.blocks[0].offset_bytes == block.offset_bytes, "the room is used again"
        client.memory[:] = bytes(len(client.memory))
        assert (await client.move(Opcode.READ, stale, block.offset_bytes)).reason is Reason.UNKNOWN_REGION
        assert not any(client.memory)


async def test_a_nodes_own_segment_opens_nothing(redis_url: str) -> None:
    async with running_node(redis_url) as node:
        assert node.node.segment.regions == ()
        assert not (await acquire(node, 1)).HasField("segment")


async def test_a_reader_whose_key_was_revoked_misses_and_asks_again(node: Node, client: Client) -> None:
    await client.stored([0, 1])

    class TooLate:
        """A transfer engine that moves bytes when the lease is over already."""

        results: Sequence[TransferResult] = ()

        async def transfer_async(
            self, requests: Sequence[TransferRequest], timeout_s: float | None = None
        ) -> list[TransferResult]:
            assert node.node.release(lease_id)
            self.results = await client.engine.transfer_async(requests, timeout_s)
            return list(self.results)

    probe = await acquire(node, 0)
    lease_id = probe.lease_id + 1
    assert await release(node, probe)
    places, mover = [client.kv.pieces(0), client.kv.pieces(1)], TooLate()
    result = await client.reader.read(node.address, [key(0), key(1)], places, OBJECT, WAIT_S, arrivals=mover)
    assert mover.results
    assert all(each.reason.is_stale for each in mover.results)
    assert result == ReadResult(0, worked=None)
    result.raise_for_failure()  # a miss is no failure
    await client.until_listed([0, 1])
    assert await client.get([0, 1]) == [True, True]


def slow_reader(lease: Any) -> socket.socket:
    """Opens a link that has asked for the whole block and reads nothing of the answer."""
    segment = segment_from_proto(lease.segment)
    sock = socket.socket()
    sock.setsockopt(socket.SOL_SOCKET, socket.SO_RCVBUF, 4096)
    sock.settimeout(WAIT_S)
    sock.connect((segment.host, segment.port))
    number = 1 + secrets.randbits(60)
    hello = handshake.Hello(number, 0, bytes(16), segment.boot_id, bytes(16), False, handshake.Service.TCP)
    sock.sendall(handshake.pack_hello(hello))
    sock.recv(handshake.HELLO_REPLY_BYTES, socket.MSG_WAITALL)
    (block,) = lease.blocks
    frame = wire.Frame(Opcode.READ, 1, 1, block.length_bytes)
    sock.sendall(wire.pack_frame(frame, [(segment.regions[0].key, block.offset_bytes, block.length_bytes)]))
    sock.recv(1)  # the server has begun its answer
    return sock


async def test_memory_being_sent_is_not_reused_when_its_lease_ends(redis_url: str) -> None:
    size = 8 << 20
    async with running_node(redis_url, pool_mib=8) as node, client_of(redis_url, slots=size // OBJECT) as client:
        client.memory[:] = b"\xaa" * size
        result = await client.store.put([(key(0), KvMemory.whole(client.region, size).pieces(0))], size, WAIT_S)
        assert result[0] in (PutOutcome.STORED, PutOutcome.EXISTS)
        lease = await acquire(node, 0)
        sock = await asyncio.to_thread(slow_reader, lease)
        try:
            assert await release(node, lease)
            assert node.figure("leases") == 1, "its room is not free yet"
            assert node.figure("reader_keys") == 0
            assert (await start(node, 1, object_bytes=size, timeout_ms=1000)).put_id == 0
            await eventually(node.nothing_is_left, "a reader that takes nothing is cut off")
            left = bytearray()
            while data := await asyncio.to_thread(_receive, sock):
                left += data
            assert set(left[wire.FRAME_HEADER_BYTES - 1 :]) == {0xAA}
            assert len(left) < size
        finally:
            sock.close()


def _receive(sock: socket.socket) -> bytes:
    try:
        return sock.recv(1 << 16)
    except ConnectionError:
        return b""
