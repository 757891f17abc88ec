"""Store nodes in this process, with real Redis, gRPC and transfers, and a client with its own memory."""

from __future__ import annotations

import asyncio
import contextlib
import hashlib
import time
from collections.abc import AsyncIterator, Sequence
from contextlib import AsyncExitStack, asynccontextmanager
from dataclasses import dataclass
from typing import Any

import grpc
import redis.asyncio
from prometheus_client import CollectorRegistry

from launch.redis_server import RedisServer
from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.errors import PinyonError
from pinyon.messages.segment import segment_from_proto
from pinyon.runtime.channel import open_channel
from pinyon.runtime.interceptors import error_from_rpc
from pinyon.runtime.service import ServiceContext
from pinyon.runtime.telemetry import Telemetry
from pinyon.runtime.transfer_engine import TransferSettings, start_transfer_engine
from pinyon.store.client import StoreClient
from pinyon.store.directory import NODES_FRESH_S
from pinyon.store.kv_memory import KvMemory, Pieces
from pinyon.store.metadata import StoreMetadata
from pinyon.store.node_channels import NodeChannels
from pinyon.store.reader import BlockReader
from pinyon.store.writer import PutOutcome
from pinyon.transfer import Opcode, Region, TransferRequest, TransferResult
from services.kvstore.app import serving
from services.kvstore.node import StoreNode
from services.kvstore.settings import KvStoreSettings
from tests.store_integrity import check_table
from tests.waiting import WAIT_S, eventually

OBJECT = 64 * 1024
STORE, READ = kvstore_pb2_grpc.KvStoreServiceStub, kvstore_pb2_grpc.BlockReadServiceStub


def key(number: int) -> bytes:
    return hashlib.blake2b(number.to_bytes(8, "big"), digest_size=16).digest()


def content(number: int, size: int = OBJECT) -> bytes:
    """Returns the content of object ``key(number)``."""
    return hashlib.shake_128(number.to_bytes(8, "big")).digest(64) * (size // 64)


@dataclass
class Node:
    node: StoreNode
    context: ServiceContext

    @property
    def address(self) -> str:
        return self.context.endpoints["grpc"]

    def figure(self, name: str) -> float:
        value = self.context.registry.get_sample_value(f"pinyon_kvstore_{name}")
        assert value is not None, name
        return value

    def nothing_is_left(self) -> bool:
        names = ("leases", "leased_objects", "open_puts", "reserved_objects", "writer_keys", "reader_keys")
        check_table(self.node.table)
        return not any(self.figure(name) for name in names)


@asynccontextmanager
async def running_node(redis_url: str, node_id: str = "kv-0", **settings: object) -> AsyncIterator[Node]:
    values: dict[str, object] = {"pool_mib": 1, "drain_s": 0.0, "node_lease_s": 60.0, **settings}
    chosen = KvStoreSettings(redis_url=redis_url, instance_id=node_id, **values)  # type: ignore[arg-type]
    context = ServiceContext("kvstore", node_id, Telemetry("kvstore", node_id), CollectorRegistry(), asyncio.Event())
    async with serving(chosen, context) as node:
        yield Node(node, context)


async def call(address: str, stub: Any, method: str, request: Any) -> Any:
    """Makes a raw call, as a foreign client would."""
    async with open_channel(address) as channel:
        try:
            return await getattr(stub(channel), method)(request, timeout=WAIT_S)
        except grpc.aio.AioRpcError as error:
            raise error_from_rpc(error) from None


async def start(node: Node, *numbers: int, object_bytes: int = OBJECT, timeout_ms: int = 0) -> Any:
    keys = b"".join(map(key, numbers))
    request = kvstore_pb2.PutStartRequest(keys=keys, object_bytes=object_bytes, timeout_ms=timeout_ms)
    return await call(node.address, STORE, "PutStart", request)


async def end(node: Node, put: Any, *, commit: bool = False) -> Any:
    return await call(node.address, STORE, "PutEnd", kvstore_pb2.PutEndRequest(put_id=put.put_id, commit=commit))


async def acquire(node: Node, *numbers: int, lease_ms: int = 60_000) -> Any:
    request = kvstore_pb2.AcquireRequest(keys=b"".join(map(key, numbers)), lease_ms=lease_ms, allow_gaps=True)
    return await call(node.address, READ, "Acquire", request)


async def release(node: Node, lease: Any) -> bool:
    reply = await call(node.address, READ, "Release", kvstore_pb2.ReleaseRequest(lease_id=lease.lease_id))
    return bool(reply.released)


class Client:
    """A store client over a buffer of ``slots`` objects."""

    def __init__(self, redis_url: str, slots: int = 64, redis_timeout_s: float = WAIT_S, **transfer: str) -> None:
        """Starts the client; ``transfer`` are settings of its transfer engine.

        Redis gets ample time by default: most tests do not cover slow answers, and its loss shows at once."""
        self.engine = start_transfer_engine(TransferSettings(**transfer))  # type: ignore[arg-type]
        self.memory = bytearray(slots * OBJECT)
        self.region: Region = self.engine.register_local_memory(self.memory)
        self.kv = KvMemory.whole(self.region, OBJECT)
        self.channels = NodeChannels()
        self.reader = BlockReader(self.engine, self.channels)
        self._ahead_s = 0.0
        metadata = StoreMetadata(redis_url, timeout_s=redis_timeout_s)
        self.store = StoreClient(self.engine, metadata, self.channels, clock=lambda: time.monotonic() + self._ahead_s)

    def forget_nodes(self) -> None:
        """Advances the clock until the list of nodes is no longer fresh."""
        self._ahead_s += NODES_FRESH_S

    async def close(self) -> None:
        await self.store.close()
        await self.reader.close()
        await self.channels.close()
        await asyncio.to_thread(self.engine.close)

    def fill(self, numbers: Sequence[int]) -> list[tuple[bytes, Pieces]]:
        """Writes the objects of these numbers to this client's memory, from slot 0 on; returns them."""
        objects = []
        for slot, number in enumerate(numbers):
            self.memory[slot * OBJECT : (slot + 1) * OBJECT] = content(number)
            objects.append((key(number), self.kv.pieces(slot)))
        return objects

    async def put(self, numbers: Sequence[int]) -> tuple[PutOutcome, ...]:
        return await self.store.put(self.fill(numbers), OBJECT, WAIT_S)

    async def stored(self, numbers: Sequence[int]) -> None:
        """Puts objects that the store lacks."""
        result = await self.put(numbers)
        assert result == (PutOutcome.STORED,) * len(numbers)

    def slot(self, slot: int) -> bytes:
        return bytes(self.memory[slot * OBJECT : (slot + 1) * OBJECT])

    async def move(
        self, opcode: Opcode, reply: Any, offset: int, length: int = OBJECT, slot: int = 0
    ) -> TransferResult:
        """Transfers between a slot and an offset of the node, with the key that the node gave in this answer."""
        segment = segment_from_proto(reply.segment)
        (region,) = segment.regions
        request = TransferRequest(opcode, self.region.key, slot * OBJECT, segment, region.key, offset, length)
        (result,) = await self.engine.transfer_async([request])
        return result

    async def get(self, numbers: Sequence[int], timeout_s: float = WAIT_S) -> list[bool]:
        """Reads the objects as a worker does, run by run, behind one that is not held, too; returns which arrived."""
        arrived = [False] * len(numbers)
        self.memory[:] = bytes(len(self.memory))
        at = 0
        while at < len(numbers):
            runs = await self.store.leading([key(each) for each in numbers[at:]], OBJECT, timeout_s)
            for node, count in runs:
                with contextlib.suppress(PinyonError):  # a node that fails is a miss
                    found = await self._read(node.address, numbers[at : at + count], at, timeout_s)
                    arrived[at : at + found] = [True] * found
                at += count
            at += not runs
        return arrived

    async def fetch(self, address: str, numbers: Sequence[int]) -> int:
        """Reads from this holder; returns how many leading objects arrived."""
        self.memory[:] = bytes(len(self.memory))
        return await self._read(address, numbers, 0, WAIT_S)

    async def _read(self, address: str, numbers: Sequence[int], slot: int, timeout_s: float) -> int:
        """Reads to this slot and the next ones; returns how many leading objects arrived, after checking them."""
        keys, places = [key(each) for each in numbers], [self.kv.pieces(slot + at) for at in range(len(numbers))]
        arrived = (await self.reader.read(address, keys, places, OBJECT, timeout_s)).leading
        await settled(self.reader)  # the lease ends in the background
        for at, number in enumerate(numbers[:arrived], slot):
            assert self.slot(at) == content(number), f"object {number} holds something else"
        return arrived

    async def remove(self, numbers: Sequence[int]) -> int:
        """Removes the objects wherever they are, by the nodes' own RPC; returns the number of replicas removed."""
        request = kvstore_pb2.RemoveRequest(keys=b"".join(map(key, numbers)))
        removed = 0
        for node in await self.store.nodes():
            removed += (await self.channels.call(node.address, STORE, "Remove", request, WAIT_S)).removed
        return removed

    async def listed(self, numbers: Sequence[int]) -> list[int]:
        """Returns how many readable replicas each object has by the metadata."""
        return [len(replicas) for replicas in await self.store.metadata.locate([key(each) for each in numbers])]

    async def until_listed(self, numbers: Sequence[int], replicas: int = 1) -> None:
        async def listed() -> bool:
            return await self.listed(numbers) == [replicas] * len(numbers)

        await eventually(listed, f"{replicas} replicas of each object")


@asynccontextmanager
async def client_of(
    redis_url: str, slots: int = 64, redis_timeout_s: float = WAIT_S, **transfer: str
) -> AsyncIterator[Client]:
    async with AsyncExitStack() as stack:
        client = Client(redis_url, slots, redis_timeout_s, **transfer)
        stack.push_async_callback(client.close)
        yield client


async def end_redis(server: RedisServer) -> None:
    """Kills Redis and waits for its end; ``start`` starts it again, empty, at the same address."""
    assert server.process is not None
    server.process.kill()
    await asyncio.to_thread(server.process.wait, WAIT_S)


async def settled(reader: BlockReader) -> None:
    """Waits until no release is under way; each is bounded."""
    while reader.duties:  # noqa: ASYNC110 - there is no event for outsiders
        await asyncio.sleep(0.001)


async def empty(redis_url: str) -> None:
    async with redis.asyncio.Redis.from_url(redis_url) as connection:
        await connection.flushall()
