"""The memory that clients without a key make the load balancer hold at its gRPC port, before and after the check."""

from __future__ import annotations

import asyncio
import contextlib
import struct

import grpc
import psutil
import pytest
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pinyon.runtime import grpc_server
from pinyon.runtime.channel import MAX_MESSAGE_BYTES
from pinyon.runtime.first_message import EACH_MAX
from tests.integration.lb_harness import WAIT_S, Connection, live_lb, running_lb, spin

STREAMS = 300
UNENDING = MAX_MESSAGE_BYTES - 1000
"""The bytes sent of a message that is 500 bytes longer."""
DATA, HEADERS, RST, SETTINGS, PING, WINDOW_UPDATE = 0, 1, 3, 4, 6, 8
INITIAL_WINDOW, FRAME_BYTES = 65_535, 16_384


def frame(kind: int, flags: int, stream: int, data: bytes | memoryview) -> bytes:
    return struct.pack(">I", len(data))[1:] + bytes((kind, flags)) + struct.pack(">I", stream) + data


def literal(name: str, value: str) -> bytes:
    return b"".join((b"\0", *(bytes((len(text),)) + text.encode() for text in (name, value))))


class Http2(Connection):
    """A client with just enough of HTTP/2 to send messages without an end."""

    async def __aenter__(self) -> Http2:
        await super().__aenter__()
        self.windows: dict[int, int] = {0: INITIAL_WINDOW}
        self.initial = INITIAL_WINDOW
        self.unsent: dict[int, memoryview] = {}
        self.reset: set[int] = set()
        self.writer.write(b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n" + frame(SETTINGS, 0, 0, struct.pack(">HI", 4, 1 << 24)))
        self.task = asyncio.create_task(self._read())
        return self

    async def __aexit__(self, *exc) -> None:
        self.task.cancel()
        await asyncio.gather(self.task, return_exceptions=True)
        with contextlib.suppress(OSError):
            await super().__aexit__(*exc)

    async def _read(self) -> None:
        while True:
            head = await self.reader.readexactly(9)
            kind, flags, stream = head[3], head[4], int.from_bytes(head[5:], "big")
            data = await self.reader.readexactly(int.from_bytes(head[:3], "big"))
            if kind == SETTINGS and not flags & 1:
                for identifier, value in struct.iter_unpack(">HI", data):
                    if identifier == 4:
                        for each in self.windows.keys() - {0}:
                            self.windows[each] += value - self.initial
                        self.initial = value
                self.writer.write(frame(SETTINGS, 1, 0, b""))
            elif kind == PING and not flags & 1:
                self.writer.write(frame(PING, 1, 0, data))
            elif kind == WINDOW_UPDATE:
                self.windows[stream] = self.windows.get(stream, self.initial) + int.from_bytes(data, "big")
            elif kind == RST:
                self.reset.add(stream)
                self.unsent.pop(stream, None)

    def refused(self, streams: int) -> bool:
        """Returns whether so many streams were refused, or the connection was cut, as when pings go unanswered."""
        return len(self.reset) >= streams or self.task.done()

    def call(self, method: str, message: bytes) -> None:
        stream = 2 * (len(self.windows) - 1) + 1
        fields = {
            ":method": "POST",
            ":scheme": "http",
            ":path": method,
            ":authority": "lb",
            "te": "trailers",
            "content-type": "application/grpc",
        }
        self.windows[stream] = self.initial
        self.unsent[stream] = memoryview(message)  # the unsent rest is sliced repeatedly
        self.writer.write(frame(HEADERS, 4, stream, b"".join(literal(*field) for field in fields.items())))

    async def push(self, seconds: float) -> None:
        """Sends as much as the windows allow, for so many seconds."""
        end = asyncio.get_running_loop().time() + seconds
        while self.unsent and asyncio.get_running_loop().time() < end:
            for stream, rest in list(self.unsent.items()):
                size = min(len(rest), self.windows[0], self.windows[stream], FRAME_BYTES)
                if size > 0:
                    self.windows[0] -= size
                    self.windows[stream] -= size
                    self.writer.write(frame(DATA, 0, stream, rest[:size]))
                    self.unsent[stream] = rest[size:]
            with contextlib.suppress(ConnectionError):
                await self.writer.drain()
            await asyncio.sleep(0.01)


@pytest.mark.parametrize(
    ("method", "held"),
    [("/pinyon.api.lb.v1.LbService/Generate", 0), ("/grpc.health.v1.Health/Check", EACH_MAX)],
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
    monkeypatch.setattr(grpc_server, "HANDSHAKE_S", 1.0)
    monkeypatch.setattr(grpc_server, "MAX_CONNECTIONS", 16)
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
