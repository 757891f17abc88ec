"""A process that lends blocks, and its address, for the tests of readers and clients."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from contextlib import asynccontextmanager

import grpc

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.messages.segment import segment_to_proto
from pinyon.transfer import TransferEngine, TransferLimits

WAIT_S = 60.0
PATIENT = TransferLimits(stall_s=2 * WAIT_S, connect_s=2 * WAIT_S, base_deadline_s=2 * WAIT_S)
"""The engines' limits, for none of which a test waits."""
BLOCK = 1024
KEYS = [bytes([number]) * 16 for number in range(8)]
OFFSETS = [number * BLOCK for number in range(8)]


class Holder(kvstore_pb2_grpc.BlockReadServiceServicer):
    """A server that holds all keys, block ``i`` filled with ``i``; ``twist`` changes the answer."""

    def __init__(self) -> None:
        self.engine = TransferEngine(limits=PATIENT)
        self.engine.start()
        self.memory = bytearray(b"".join(bytes([number]) * BLOCK for number in range(8)))
        self.region = self.engine.register_local_memory(self.memory)
        self.asked: list[kvstore_pb2.AcquireRequest] = []
        self.leases: set[int] = set()
        self.twist = lambda reply: None
        self.gate = asyncio.Event()
        self.gate.set()
        self.reached = asyncio.Event()
        self.renewals = 0
        self.renewed = asyncio.Event()
        """Set at the third renewal."""
        self.renews = True
        self.complaints: list[int] = []

    async def Acquire(self, request: kvstore_pb2.AcquireRequest, context: object) -> kvstore_pb2.AcquireResponse:
        self.asked.append(request)
        reply = kvstore_pb2.AcquireResponse(
            lease_id=len(self.asked), lease_ms=request.lease_ms, segment=segment_to_proto(self.engine.descriptor())
        )
        for index in range(len(request.keys) // 16):
            number = request.keys[index * 16]
            reply.blocks.add(index=index, offset_bytes=number * BLOCK, length_bytes=BLOCK)
        self.twist(reply)
        if reply.lease_id:
            self.leases.add(reply.lease_id)
        self.reached.set()
        await asyncio.shield(self.gate.wait())
        return reply

    async def Renew(self, request: kvstore_pb2.RenewRequest, context: object) -> kvstore_pb2.RenewResponse:
        assert request.lease_id in self.leases
        self.renewals += 1
        if self.renewals >= 3 or not self.renews:
            self.renewed.set()
        return kvstore_pb2.RenewResponse(lease_ms=200 if self.renews else 0)

    async def Release(self, request: kvstore_pb2.ReleaseRequest, context: object) -> kvstore_pb2.ReleaseResponse:
        self.leases.remove(request.lease_id)
        self.complaints += request.corrupt
        return kvstore_pb2.ReleaseResponse(released=True)


@asynccontextmanager
async def serving(holder: Holder) -> AsyncIterator[str]:
    """Yields the address of a server for the holder."""
    server = grpc.aio.server(options=(("grpc.so_reuseport", 0),))
    kvstore_pb2_grpc.add_BlockReadServiceServicer_to_server(holder, server)
    port = server.add_insecure_port("127.0.0.1:0")
    await server.start()
    yield f"127.0.0.1:{port}"
    await server.stop(None)
