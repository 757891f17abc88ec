"""Sessions within the event loop, beside grpcio on one port: who is served by whom, and what strangers can do."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
from collections.abc import AsyncIterator, Callable
from contextlib import asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest

from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.errors import PermissionDenied, PinyonError, Unavailable
from pinyon.runtime import grpc_server
from pinyon.runtime.channel import GRPCIO, HTTP2, Channels, open_channel
from pinyon.runtime.duplex import Accepted, Dialed, Method
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.http2.client import Http2Channel
from pinyon.runtime.http2.connection import Connection
from pinyon.runtime.http2.front import Front
from pinyon.runtime.http2.heads import parse_trailers, request_head
from pinyon.runtime.http2.hello import ALPN, Speaker, who_speaks, who_speaks_tls
from pinyon.runtime.http2.wire import PREFACE, frame, settings
from pinyon.runtime.identity import caller, peer_name
from services.worker.callers import WORKER_CALLERS
from tests.tls_files import TestAuthority

WAIT_S = 30.0
Ask, Answer = worker_pb2.SessionRequest, worker_pb2.SessionResponse
METHOD = Method("/pinyon.api.worker.v1.WorkerService/Session", Ask, Answer)
SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """Answers each message with one, and keeps what it saw of its callers."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, str, str]] = []
        self.begun = asyncio.Event()
        self.ended = asyncio.Event()

    async def Session(self, _: Any, context: Any) -> None:
        self.seen.append((type(context).__name__, str(caller(context)), context.peer()))
        self.begun.set()
        stream = Accepted[Answer, Ask](context, WAIT_S)

        async def take(message: Ask) -> None:
            await stream.write(Answer())

        try:
            await stream.run(take)
        finally:
            self.ended.set()

    async def GetStatus(self, request: Any, context: Any) -> Any:
        self.seen.append((type(context).__name__, str(caller(context)), context.peer()))
        return worker_pb2.GetStatusResponse()


class Running:
    def __init__(self, tls: Any = None, sessions: bool = True, listen: str = "127.0.0.1:0") -> None:
        self.worker = Worker()
        self.server = GrpcServer(listen, tls, sessions=sessions)
        self.server.add(worker_pb2_grpc.add_WorkerServiceServicer_to_server, self.worker, SERVICE, WORKER_CALLERS)
        self.address = ""

    @property
    def front(self) -> Front:
        assert self.server._front is not None
        return self.server._front

    async def __aenter__(self) -> Running:
        self.address = await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.drain(0)


async def once(dialed: Dialed[Ask, Answer]) -> int:
    """Answers to one message. Raises what the stream ended with."""
    got: list[Answer] = []

    async def says() -> AsyncIterator[Ask]:
        yield Ask()

    async with asyncio.timeout(WAIT_S):
        await dialed.run(got.append, says())  # type: ignore[arg-type]
    return len(got)


async def until(condition: Callable[[], bool]) -> None:
    async with asyncio.timeout(WAIT_S):
        while not condition():  # noqa: ASYNC110
            await asyncio.sleep(0.005)


@asynccontextmanager
async def connected(address: str) -> AsyncIterator[tuple[asyncio.StreamReader, asyncio.StreamWriter]]:
    host, _, port = address.rpartition(":")
    reader, writer = await asyncio.open_connection(host, int(port))
    try:
        yield reader, writer
    finally:
        writer.close()
        with suppress(OSError):
            await writer.wait_closed()


async def read_all(reader: asyncio.StreamReader) -> bytes:
    """Until it is closed, which may be a reset where not all was read."""
    async with asyncio.timeout(WAIT_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


# -- who is served by whom


async def test_each_client_is_served_by_its_own_kind_and_seen_where_it_is() -> None:
    async with Running() as running:
        assert await once(Dialed(running.address, METHOD, WAIT_S, Http2Channel)) == 1
        assert await once(Dialed(running.address, METHOD, WAIT_S, open_channel)) == 1
        async with open_channel(running.address) as channel:
            await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest())
        ours, theirs, unary = running.worker.seen
        assert ours[0] == "SessionContext"
        assert theirs[0] == unary[0] != ours[0]
        await until(lambda: running.front.connections == 0)


@pytest.mark.parametrize("sessions", [False, True])
@pytest.mark.parametrize("transport", [HTTP2, GRPCIO])
async def test_with_tls_both_prove_who_they_are(tmp_path: Path, sessions: bool, transport: str) -> None:
    """Also against a server of before, which knows nothing of sessions: it takes ``h2``."""
    authority = TestAuthority(tmp_path)
    channels = Channels(authority.tls("lb", "lb-7"), transport)
    async with Running(authority.tls("worker", "decode-1"), sessions) as running:
        connect = channels.sessions_to(peer_name("worker", "decode-1"))
        assert await once(Dialed(running.address, METHOD, WAIT_S, connect)) == 1
        ((kind, who, _),) = running.worker.seen
        assert who == "lb lb-7"
        assert (kind == "SessionContext") == (sessions and transport == HTTP2)

        another = channels.sessions_to(peer_name("worker", "decode-2"))
        with pytest.raises(Unavailable):
            await once(Dialed(running.address, METHOD, WAIT_S, another))
        stranger = Channels(TestAuthority(tmp_path / "other").tls("lb", "lb-7"), transport)
        with pytest.raises(PinyonError):
            await once(Dialed(running.address, METHOD, WAIT_S, stranger.sessions_to(peer_name("worker", "decode-1"))))
        store = Channels(authority.tls("kvstore", "kv-0"), transport).sessions_to(peer_name("worker", "decode-1"))
        with pytest.raises(PermissionDenied):
            await once(Dialed(running.address, METHOD, WAIT_S, store))
        assert len(running.worker.seen) == 1


async def test_who_may_not_call_is_logged_with_its_own_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    """grpcio sees who relays to it."""
    authority = TestAuthority(tmp_path)
    async with Running(authority.tls("worker", "decode-1")) as running:
        store = Channels(authority.tls("kvstore", "kv-0"), GRPCIO)
        with caplog.at_level(logging.WARNING):
            async with store.open(running.address, peer_name("worker", "decode-1")) as channel:
                with pytest.raises(grpc.aio.AioRpcError):
                    await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(
                        worker_pb2.GetStatusRequest(), wait_for_ready=True, timeout=WAIT_S
                    )
                ports = {f"ipv4:127.0.0.1:{port}" for port in _ports_to(int(running.address.rpartition(":")[2]))}
        (refused,) = [record for record in caplog.records if "refused" in record.getMessage()]
        assert refused.peer in ports  # type: ignore[attr-defined]


def _ports_to(port: int) -> set[int]:
    """Where connections of this machine to that port come from."""
    found = set()
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    for fields in [line.split() for table in tables for line in table]:
        if int(fields[2].rpartition(":")[2], 16) == port:
            found.add(int(fields[1].rpartition(":")[2], 16))
    return found


async def test_a_method_of_one_message_and_one_that_is_not_there_are_unimplemented_within_the_loop() -> None:
    async with Running() as running:
        for path in ("/pinyon.api.worker.v1.WorkerService/GetStatus", "/nothing.Here/Nowhere"):
            with pytest.raises(PinyonError, match="Method not found"):
                await once(Dialed(running.address, Method(path, Ask, Answer), WAIT_S, Http2Channel))


class Kept:
    """What a raw call is told."""

    def __init__(self) -> None:
        self.heads: list[tuple[Any, bool]] = []

    def headed(self, fields: Any, end: bool) -> None:
        self.heads.append((fields, end))

    def message(self, message: bytes) -> None: ...

    def half_closed(self) -> None: ...

    def refused(self, error: Exception) -> None: ...

    def failed(self, error: Exception) -> None: ...

    def writable(self) -> None: ...


async def test_a_call_ends_by_its_deadline() -> None:
    async with Running() as running, connected(running.address) as (reader, writer):
        connection, kept = Connection(writer.write), Kept()
        writer.write(connection.opening)
        connection.open([*request_head(METHOD.path, "x", "http"), (b"grpc-timeout", b"50m")], kept)
        async with asyncio.timeout(WAIT_S):
            while not (kept.heads and kept.heads[-1][1]):
                connection.receive(await reader.read(1 << 16))
            await running.worker.ended.wait()
        assert parse_trailers(kept.heads[-1][0]).code == "DEADLINE_EXCEEDED"


@pytest.mark.parametrize(
    ("head", "status"),
    [
        ([(b":method", b"GET")], b"405"),
        ([(b":method", b"POST"), (b"content-type", b"text/html")], b"415"),
        ([*request_head("/x", "x", "http"), (b"grpc-timeout", b"soon")], b"400"),
    ],
)
async def test_what_is_no_call_is_told_in_http_s_words(head: Any, status: bytes) -> None:
    async with Running() as running, connected(running.address) as (reader, writer):
        connection, kept = Connection(writer.write), Kept()
        writer.write(connection.opening)
        connection.open(head, kept)
        async with asyncio.timeout(WAIT_S):
            while not kept.heads:
                connection.receive(await reader.read(1 << 16))
        assert kept.heads == [([(b":status", status)], True)]


# -- its first bytes


def test_what_the_first_bytes_say() -> None:
    ours = Connection(lambda _: None).opening
    others = PREFACE + settings({3: 100, 4: 65535})
    for data, speaker in ((ours, Speaker.OURS), (others, Speaker.OTHER)):
        until_known = [who_speaks(data[:size]) for size in range(len(PREFACE) + 9, len(data) + 1)]
        assert until_known[-1] is speaker
        assert set(until_known) <= {speaker, Speaker.UNKNOWN}
        assert {who_speaks(data[:size]) for size in range(len(PREFACE) + 9)} == {Speaker.UNKNOWN}
    assert who_speaks(b"GET / HTTP/1.1\r\n") is Speaker.OTHER
    assert who_speaks(PREFACE + frame(6, 0, 0, b"12345678")) is Speaker.OTHER
    assert who_speaks(PREFACE + settings(dict.fromkeys(range(100), 1))) is Speaker.OTHER


@pytest.mark.parametrize("protocols", [[ALPN, "h2"], ["h2"], ["grpc-exp", "h2", ALPN], []])
def test_what_a_client_hello_says(protocols: list[str]) -> None:
    """Of the one that the ssl library makes."""
    import ssl

    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    if protocols:
        context.set_alpn_protocols(protocols)
    incoming, outgoing = ssl.MemoryBIO(), ssl.MemoryBIO()
    session = context.wrap_bio(incoming, outgoing, server_hostname="decode-1.worker.pinyon")
    with suppress(ssl.SSLWantReadError):
        session.do_handshake()
    hello = outgoing.read()
    assert who_speaks_tls(hello, ALPN.encode()) is (Speaker.OURS if ALPN in protocols else Speaker.OTHER)
    assert {who_speaks_tls(hello[:size], ALPN.encode()) for size in range(len(hello))} == {Speaker.UNKNOWN}
    for at in range(5, len(hello)):  # whatever is wrong in it, nothing is raised
        for value in (0, 255):
            broken = hello[:at] + bytes((value,)) + hello[at + 1 :]
            assert who_speaks_tls(broken, ALPN.encode()) in (Speaker.OURS, Speaker.OTHER)


# -- strangers


async def test_who_does_not_say_who_it_is_is_closed_in_time(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "HANDSHAKE_S", 0.2)
    async with Running() as running:
        for said in (b"", PREFACE[:5], PREFACE + b"\0\0\xf0\x04\0\0\0\0\0"):
            async with connected(running.address) as (reader, writer):
                writer.write(said)
                assert await read_all(reader) == b""
        assert running.front.connections == 0
        assert not running.front._waiting


async def test_there_is_an_end_to_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(grpc_server, "MAX_CONNECTIONS", 2)
    async with Running() as running, connected(running.address), connected(running.address):
        await until(lambda: running.front.connections == 2)
        async with connected(running.address) as (reader, _):
            assert await read_all(reader) == b""
        assert running.front.connections == 2
    assert running.front.connections == 0


async def test_a_connection_without_a_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pinyon.runtime.http2.server.IDLE_S", 0.3)
    async with Running() as running, connected(running.address) as (reader, writer):
        writer.write(Connection(lambda _: None).opening)
        answers = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(WAIT_S):
            while not answers.done():  # it is there, and says so
                writer.write(frame(6, 1, 0, b"\0" * 8))
                await asyncio.wait({answers}, timeout=0.1)
        await until(lambda: running.front.connections == 0)


async def test_what_breaks_the_protocol_is_told_and_closed() -> None:
    async with Running() as running, connected(running.address) as (reader, writer):
        writer.write(Connection(lambda _: None).opening + frame(5, 4, 1, b"push"))
        answer = await read_all(reader)
        assert answer[-4 - len("push is off") - 4 :][:8] == b"\0\0\0\0\0\0\0\1"
        assert answer.endswith(b"push is off")


# -- peers that are not there any more


async def test_a_peer_that_falls_silent_is_gone_soon() -> None:
    """Connected, and then it says nothing, not even to a ping."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        dialed = Dialed(f"127.0.0.1:{listener.getsockname()[1]}", METHOD, WAIT_S, Http2Channel)

        async def nothing() -> AsyncIterator[Ask]:
            await loop.create_future()
            yield Ask()

        running = asyncio.ensure_future(dialed.run(lambda _: None, nothing()))  # type: ignore[arg-type]
        client, _ = await loop.sock_accept(listener)
        with client:
            await loop.sock_sendall(client, settings({}))
            with pytest.raises(Unavailable, match="silent"):
                async with asyncio.timeout(WAIT_S):
                    await running
        assert dialed.connected


async def test_a_caller_that_falls_silent_is_gone_soon() -> None:
    async with Running() as running, connected(running.address) as (_, writer):
        said: list[bytes] = []
        client = Connection(said.append)
        client.open(request_head(METHOD.path, "x", "http"), Kept())
        writer.write(client.opening + b"".join(said))
        async with asyncio.timeout(WAIT_S):
            await running.worker.begun.wait()
            await running.worker.ended.wait()
        await until(lambda: running.front.connections == 0)


async def test_calls_in_flight_end_with_the_server_and_not_before_their_time() -> None:
    for seconds in (0.0, WAIT_S):
        async with Running() as running:
            finish = asyncio.Event()

            async def says(finish: asyncio.Event = finish) -> AsyncIterator[Ask]:
                yield Ask()
                await finish.wait()

            got: list[Answer] = []
            dialed = Dialed(running.address, METHOD, WAIT_S, Http2Channel)
            call = asyncio.ensure_future(dialed.run(got.append, says()))  # type: ignore[arg-type]
            await until(lambda got=got: bool(got))  # type: ignore[misc]
            draining = asyncio.ensure_future(running.server.drain(seconds))
            if seconds:
                await until(lambda: not running.front._listening)
                assert not call.done()
                finish.set()
                await call
            else:
                with pytest.raises(Unavailable):
                    await call
            await asyncio.wait_for(draining, WAIT_S)


async def test_nothing_is_left_of_connections_of_either_kind() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with Running() as running:
        for connect in (Http2Channel, open_channel):
            await once(Dialed(running.address, METHOD, WAIT_S, connect))
        await until(lambda: running.front.connections == 0)
        before = descriptors()
        for _ in range(20):
            for connect in (Http2Channel, open_channel):
                await once(Dialed(running.address, METHOD, WAIT_S, connect))
            async with connected(running.address) as (_, writer):
                writer.write(b"nonsense")
        await until(lambda: running.front.connections == 0 and descriptors() <= before)
        assert not running.front._tasks
        assert not running.front._waiting
