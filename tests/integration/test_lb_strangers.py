"""The memory that clients without a key make the load balancer hold at its gRPC port, before and after the check."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc
from h2.connection import H2Connection
from h2.events import StreamReset

from pinyon.runtime.channel import MAX_MESSAGE_BYTES
from pinyon.runtime.first_message import EACH_MAX
from pinyon.runtime.http2 import listener
from tests.integration.lb_harness import WAIT_S, Connection, live_lb, running_lb, spin

STREAMS = 300
UNENDING = MAX_MESSAGE_BYTES - 1000
"""The bytes sent of a message that is 500 bytes longer."""
INITIAL_WINDOW, FRAME_BYTES = 65_535, 16_384


class Http2(Connection):
    """A client that sends messages without an end."""

    async def __aenter__(self) -> Http2:
        await super().__aenter__()
        self.h2 = H2Connection()
        self.h2.initiate_connection()
        self.unsent: dict[int, memoryview] = {}
        self.reset: set[int] = set()
        self.task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        with contextlib.suppress(OSError):
            await super().__aexit__(*exc)

    async def _read(self) -> None:
        while data := await self.reader.read(1 << 16):
            for event in self.h2.receive_data(data):
                if isinstance(event, StreamReset):
                    self.reset.add(event.stream_id)
                    self.unsent.pop(event.stream_id, None)
            self.writer.write(self.h2.data_to_send())

    def refused(self, streams: int) -> bool:
        """Returns whether so many streams were refused, or the connection was cut, as when pings go unanswered."""
        return len(self.reset) >= streams or self.task.done()

    def call(self, method: str, message: bytes) -> None:
        stream = self.h2.get_next_available_stream_id()
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "lb",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        self.h2.send_headers(stream, list(fields.items()))
        self.unsent[stream] = memoryview(message)  # the unsent rest is sliced repeatedly
        self.writer.write(self.h2.data_to_send())

    async def push(self, seconds: float) -> None:
        """Sends as much as the windows allow, for so many seconds."""
        end = asyncio.get_running_loop().time() + seconds
        while self.unsent and asyncio.get_running_loop().time() < end:
            for stream, rest in list(self.unsent.items()):
                size = min(len(rest), self.h2.local_flow_control_window(stream), FRAME_BYTES)
                if size > 0:
                    self.h2.send_data(stream, rest[:size].tobytes())
                    self.unsent[stream] = rest[size:]
            self.writer.write(self.h2.data_to_send())
            with contextlib.suppress(ConnectionError):
                await self.writer.drain()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("method", "held"), [("/pinyon.api.lb.v1.LbService/Generate", 0), ("/grpc.health.v1.Health/Check", EACH_MAX)]
)
async def test_messages_without_an_end_are_few(tmp_path, keys, method, held):
    """An earlier version held 1.2 GB for 300 messages on one connection for as long as it stood, without a key."""
    message = b"\0" + struct.pack(">I", UNENDING + 500) + bytes(UNENDING)
    async with live_lb(tmp_path, api_keys_file=keys, body_timeout_s=10) as lb:
        before = lb.memory_bytes
        async with Http2(lb.process.endpoints["grpc"]) as stranger:
            for _ in range(STREAMS):
                stranger.call(method, message)
            await stranger.push(5)
            async with asyncio.timeout(WAIT_S):
                while not stranger.refused(STREAMS - held):  # noqa: ASYNC110 - a process has no event for us
                    await asyncio.sleep(0.01)
            # Beside the messages with a place, each stream had one window's worth on its way until it was refused.
            assert lb.memory_bytes - before < held * 2 * MAX_MESSAGE_BYTES + STREAMS * 4 * INITIAL_WINDOW
            async with asyncio.timeout(WAIT_S):  # the messages with a place had their time
                while not stranger.refused(STREAMS):  # noqa: ASYNC110 - a process has no event for us
                    await asyncio.sleep(0.05)
        assert (await lb.complete(headers={"Authorization": "Bearer sk-a"}, max_tokens=1)).status == 200


async def test_silent_connections_are_closed_and_few(tmp_path, monkeypatch):
    """A connection without a byte is soon closed: such connections took all descriptors of the process."""
    monkeypatch.setattr(listener, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 16)
    async with running_lb() as bench, contextlib.AsyncExitStack() as stack:
        own = psutil.Process()
        before = own.num_fds()
        silent = [await stack.enter_async_context(Connection(bench.endpoints["grpc"])) for _ in range(64)]
        async with asyncio.timeout(WAIT_S):
            for each in silent:
                with contextlib.suppress(ConnectionResetError):
                    while await each.reader.read(1024):
                        pass
        for each in silent:
            each.drop()
        await spin(lambda: own.num_fds() <= before + 4)
        async with grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel:
            reply = await health_pb2_grpc.HealthStub(channel).Check(health_pb2.HealthCheckRequest(), timeout=WAIT_S)
            assert reply.status == health_pb2.HealthCheckResponse.SERVING
