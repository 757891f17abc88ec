"""A frozen peer ends a stream within seconds: no caller waits for a minute, or for ever."""

from __future__ import annotations

import asyncio
import signal
import subprocess
import sys

import grpc
import pytest

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.runtime.channel import CHANNEL_OPTIONS, open_channel

SERVER = """
import asyncio, sys
from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.runtime.grpc_server import GrpcServer

class Waiting(kvstore_pb2_grpc.KvStoreServiceServicer):
    async def GetNodeStatus(self, request, context):
        print("called", flush=True)
        await asyncio.Event().wait()

async def main():
    server = GrpcServer("127.0.0.1:0")
    service = kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"]
    server.add(Waiting(), service)
    print(await server.start(), flush=True)
    await asyncio.Event().wait()

asyncio.run(main())
"""


def test_a_frozen_peer_is_noticed_in_time_for_its_requests():
    options = dict(CHANNEL_OPTIONS)
    silence_ms = options["grpc.keepalive_timeout_ms"]
    assert options["grpc.http2.ping_timeout_ms"] == silence_ms, "the longer one counts"
    assert options["grpc.keepalive_time_ms"] + silence_ms <= 1_500
    assert options["grpc.http2.max_pings_without_data"] == 0


async def test_a_call_to_a_frozen_peer_ends():
    process = subprocess.Popen([sys.executable, "-c", SERVER], stdout=subprocess.PIPE, text=True)
    assert process.stdout is not None
    try:
        address = (await asyncio.to_thread(process.stdout.readline)).strip()
        async with open_channel(address) as channel:
            stub = kvstore_pb2_grpc.KvStoreServiceStub(channel)
            call = asyncio.ensure_future(stub.GetNodeStatus(kvstore_pb2.GetNodeStatusRequest(), timeout=40))
            assert (await asyncio.to_thread(process.stdout.readline)).strip() == "called"
            process.send_signal(signal.SIGSTOP)
            with pytest.raises(grpc.aio.AioRpcError) as caught:
                await call
            # The call's own deadline would be DEADLINE_EXCEEDED.
            assert caught.value.code() is grpc.StatusCode.UNAVAILABLE
    finally:
        process.kill()
        process.wait(timeout=10)
        process.stdout.close()
