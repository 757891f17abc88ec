from __future__ import annotations

import asyncio
import struct
from typing import Any

import grpc
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from hpack import Encoder

from pinyon.runtime.grpc_server import GrpcServer, Health
from pinyon.runtime.http2.wire import DATA, HEADERS, INITIAL_WINDOW_SIZE, PREFACE, SETTINGS, frame, settings

WAIT_S = 30.0
Status = health_pb2.HealthCheckResponse
HEAD = (
    *((":method", "POST"), (":scheme", "http"), (":path", "/grpc.health.v1.Health/Watch"), (":authority", "x")),
    *(("te", "trailers"), ("content-type", "application/grpc")),
)
END_HEADERS, END_STREAM, ACK = 4, 1, 1


async def test_a_watcher_that_reads_late_hears_the_last_word() -> None:
    health, nobody = Health(), None
    watch = health.Watch(health_pb2.HealthCheckRequest(service="s"), nobody)
    assert (await anext(watch)).status == Status.SERVICE_UNKNOWN
    health.say(["s"], Status.SERVING)
    health.say(["s"], Status.NOT_SERVING)
    assert (await anext(watch)).status == Status.NOT_SERVING
    following = asyncio.ensure_future(anext(watch))
    health.say(["another"], Status.SERVING)
    await asyncio.sleep(0)
    assert not following.done()
    health.say(["s"], Status.SERVING)
    assert (await following).status == Status.SERVING
    await watch.aclose()


@pytest.mark.parametrize("sessions", [False, True], ids=["by grpcio", "within the loop"])
async def test_a_watcher_that_reads_nothing_holds_nobody_up(sessions: bool) -> None:
    """The watcher's window is 0: nothing can be written to it."""
    server = GrpcServer("127.0.0.1:0", sessions=sessions)
    host, _, port = (await server.start()).rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    fields = Encoder().encode(HEAD)
    writer.write(PREFACE + settings({INITIAL_WINDOW_SIZE: 0}) + frame(HEADERS, END_HEADERS, 1, fields))
    writer.write(frame(DATA, END_STREAM, 1, struct.pack(">BI", 0, 0)))
    head = await reader.readexactly(9)
    while head[3] != HEADERS:  # the answer shows that the watch has begun
        await reader.readexactly(int.from_bytes(head[:3], "big"))
        if head[3] == SETTINGS and not head[4] & ACK:
            writer.write(frame(SETTINGS, ACK, 0, b""))
        head = await reader.readexactly(9)
    async with asyncio.timeout(WAIT_S):
        await server.set_serving(False)
        async with grpc.aio.insecure_channel(f"{host}:{port}") as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            assert (await stub.Check(health_pb2.HealthCheckRequest())).status == Status.NOT_SERVING
        await server.drain(0)
    writer.close()
