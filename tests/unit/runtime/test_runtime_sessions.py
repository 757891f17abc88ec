"""Servers within the event loop: the clients they serve, and the limits for strangers."""

from __future__ import annotations

import asyncio
import logging
import os
import socket
import ssl
import time
from collections.abc import AsyncIterator, Callable
from contextlib import AsyncExitStack, asynccontextmanager, suppress
from pathlib import Path
from typing import Any

import grpc
import pytest
import uvloop

from pinyon.api.worker.v1 import worker_pb2, worker_pb2_grpc
from pinyon.core.errors import PermissionDenied, PinyonError, Unavailable
from pinyon.runtime.channel import Channels, OpenSession, open_channel, open_session
from pinyon.runtime.duplex import Accepted, Dialed, Method
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.http2 import listener
from pinyon.runtime.http2.connection import Http2Connection
from pinyon.runtime.http2.heads import parse_trailers, request_head
from pinyon.runtime.http2.listener import Listener
from pinyon.runtime.http2.protocol import DEAD_TICKS, EXCUSED, Http2Protocol
from pinyon.runtime.http2.server import IDLE_DEAD_TICKS, Http2Server
from pinyon.runtime.http2.wire import PREFACE, ErrorCode, frame, settings
from pinyon.runtime.identity import caller, peer_name
from pinyon.runtime.tls import server_context
from services.worker.servicer import WORKER_CALLERS
from tests.tls_files import TestAuthority

WAIT_S = 60.0
Ask, Answer = worker_pb2.SessionRequest, worker_pb2.SessionResponse
METHOD = Method("/pinyon.api.worker.v1.WorkerService/Session", Ask, Answer)
SERVICE = worker_pb2.DESCRIPTOR.services_by_name["WorkerService"]


@pytest.fixture(autouse=True)
def connecting_may_take_long(monkeypatch: pytest.MonkeyPatch) -> None:
    """Lifts the limit of connecting, for which no test waits."""
    monkeypatch.setattr("pinyon.runtime.http2.client.CONNECT_S", WAIT_S)


class Worker(worker_pb2_grpc.WorkerServiceServicer):
    """A servicer that answers each message with one, and keeps what it saw of its callers."""

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
    def __init__(
        self, tls: Any = None, sessions: bool = True, listen: str = "127.0.0.1:0", worker: Worker | None = None
    ) -> None:
        self.worker = worker or Worker()
        self.server = GrpcServer(listen, tls, sessions=sessions)
        self.server.add(self.worker, SERVICE, WORKER_CALLERS)
        self.address = ""

    @property
    def listener(self) -> Listener:
        assert isinstance(self.server._server, Http2Server)
        return self.server._server.listener

    async def __aenter__(self) -> Running:
        self.address = await self.server.start()
        return self

    async def __aexit__(self, *_: object) -> None:
        await self.server.drain(0)


async def once(dialed: Dialed[Ask, Answer]) -> int:
    """Returns the number of answers to one message; raises the stream's error."""
    got: list[Answer] = []

    async def says() -> AsyncIterator[Ask]:
        yield Ask()

    async with asyncio.timeout(WAIT_S):
        await dialed.run(got.append, says())  # type: ignore[arg-type]
    return len(got)


async def status(address: str) -> None:
    """Calls a method of one message, by grpcio."""
    async with open_channel(address) as channel:
        await worker_pb2_grpc.WorkerServiceStub(channel).GetStatus(worker_pb2.GetStatusRequest(), timeout=WAIT_S)


async def answered_by_grpcio(address: str) -> None:
    """Sends one message and awaits its answer, by grpcio."""
    async with open_channel(address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Session(timeout=WAIT_S)
        await call.write(Ask())
        assert await call.read() == Answer()
        await call.done_writing()
        assert await call.code() is grpc.StatusCode.OK


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
    """Reads until the connection is closed, possibly by a reset when not all was read."""
    async with asyncio.timeout(WAIT_S):
        try:
            return await reader.read()
        except ConnectionResetError:
            return b""


# -- who is served


async def test_every_client_is_served_and_seen_where_it_is() -> None:
    async with Running() as running:
        assert await once(Dialed(running.address, METHOD, WAIT_S)) == 1
        await answered_by_grpcio(running.address)
        await status(running.address)
        assert {each[:2] for each in running.worker.seen} == {("SessionContext", "None")}
        assert len({each[2] for each in running.worker.seen}) == 3
        await until(lambda: running.listener.connections == 0)


async def test_calls_beyond_those_at_once_wait_for_their_turn() -> None:
    async with Running() as running, open_channel(running.address) as channel:
        stub = worker_pb2_grpc.WorkerServiceStub(channel)
        asked = [stub.GetStatus(worker_pb2.GetStatusRequest(), timeout=WAIT_S) for _ in range(300)]
        assert await asyncio.gather(*asked) == [worker_pb2.GetStatusResponse()] * 300
        assert running.listener.connections == 1


async def test_a_connection_stays_between_its_calls(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pinyon.runtime.http2.server.IDLE_S", 0.0)
    async with Running() as running, connected(running.address) as (reader, writer):
        connection, pings = Http2Connection(writer.write), 0
        writer.write(connection.opening)
        async with asyncio.timeout(WAIT_S):
            for _ in range(2):
                kept = Kept()
                connection.open(request_head(METHOD.path, "x", "http"), kept).end()
                while not (kept.heads and kept.heads[-1][1]):
                    connection.receive(await reader.read(1 << 16))
                assert parse_trailers(kept.heads[-1][0]).code == "OK"
                pings = 0
                while pings < 3:  # these pings are answered
                    data = await reader.read(1 << 16)
                    assert data
                    pings += data.count(frame(6, 0, 0, bytes(8)))
                    connection.receive(data)


@pytest.mark.parametrize("sessions", [False, True])
async def test_with_tls_both_prove_who_they_are(tmp_path: Path, sessions: bool) -> None:
    """The server may also be grpcio's."""
    authority = TestAuthority(tmp_path)
    channels = Channels(authority.tls("lb", "lb-7"))
    async with Running(authority.tls("worker", "decode-1"), sessions) as running:
        connect = channels.sessions_to(peer_name("worker", "decode-1"))
        assert await once(Dialed(running.address, METHOD, WAIT_S, connect)) == 1
        ((kind, who, _),) = running.worker.seen
        assert who == "lb lb-7"
        assert (kind == "SessionContext") == sessions

        another = channels.sessions_to(peer_name("worker", "decode-2"))
        with pytest.raises(Unavailable):
            await once(Dialed(running.address, METHOD, WAIT_S, another))
        stranger = Channels(TestAuthority(tmp_path / "other").tls("lb", "lb-7"))
        with pytest.raises(PinyonError):
            await once(Dialed(running.address, METHOD, WAIT_S, stranger.sessions_to(peer_name("worker", "decode-1"))))
        store = Channels(authority.tls("kvstore", "kv-0")).sessions_to(peer_name("worker", "decode-1"))
        with pytest.raises(PermissionDenied):
            await once(Dialed(running.address, METHOD, WAIT_S, store))
        assert len(running.worker.seen) == 1


async def test_who_may_not_call_is_logged_with_its_own_address(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    authority = TestAuthority(tmp_path)
    async with Running(authority.tls("worker", "decode-1")) as running:
        store = Channels(authority.tls("kvstore", "kv-0"))
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
    """Returns the local ports of this machine's connections to that port."""
    found = set()
    tables = [Path("/proc/net", name).read_text().splitlines()[1:] for name in ("tcp", "tcp6")]
    for fields in [line.split() for table in tables for line in table]:
        if int(fields[2].rpartition(":")[2], 16) == port:
            found.add(int(fields[1].rpartition(":")[2], 16))
    return found


async def test_a_method_that_is_not_there_is_unimplemented() -> None:
    async with Running() as running:
        with pytest.raises(PinyonError, match="Method not found"):
            await once(Dialed(running.address, Method("/nothing.Here/Nowhere", Ask, Answer), WAIT_S))


class Kept:
    """The events that a raw call is told."""

    def __init__(self) -> None:
        self.heads: list[tuple[Any, bool]] = []

    def headed(self, fields: Any, end: bool) -> None:
        self.heads.append((fields, end))

    def message(self, message: bytes) -> None: ...

    def half_closed(self) -> None: ...

    def refused(self, error: Exception) -> None: ...

    def failed(self, error: Exception) -> None: ...

    def writable(self) -> None: ...


async def test_calls_without_end_are_served_on_one_connection(monkeypatch: pytest.MonkeyPatch) -> None:
    """The speed of the calls does not matter: no tick passes here. Calls that their client breaks off are bounded."""
    monkeypatch.setattr("pinyon.runtime.http2.protocol.TICK_S", 10 * WAIT_S)
    async with Running() as running, connected(running.address) as (reader, writer):
        connection = Http2Connection(writer.write)
        writer.write(connection.opening)
        async with asyncio.timeout(WAIT_S):
            for _ in range(500):
                kept = Kept()
                connection.open(request_head(METHOD.path, "x", "http"), kept).end()
                while not (kept.heads and kept.heads[-1][1]):
                    data = await reader.read(1 << 16)
                    assert data
                    connection.receive(data)
                assert parse_trailers(kept.heads[-1][0]).code == "OK"
            for _ in range(500):
                connection.open(request_head(METHOD.path, "x", "http"), Kept()).reset(ErrorCode.CANCEL)
            await read_all(reader)  # the connection ends


class Refusing(Worker):
    async def Session(self, _: Any, context: Any) -> None:
        raise PermissionDenied("not for you")


@pytest.mark.parametrize(("path", "code"), [("/x/Y", "UNIMPLEMENTED"), (METHOD.path, "PERMISSION_DENIED")])
async def test_refused_calls_are_paid_by_their_client(monkeypatch: pytest.MonkeyPatch, path: str, code: str) -> None:
    """The connection ends because no tick passes here; served calls would have been given back."""
    monkeypatch.setattr("pinyon.runtime.http2.protocol.TICK_S", 10 * WAIT_S)
    async with Running(worker=Refusing()) as running, connected(running.address) as (reader, writer):
        connection = Http2Connection(writer.write)
        writer.write(connection.opening)
        answered, data = 0, b"x"
        async with asyncio.timeout(WAIT_S):
            while data and answered < 500:
                kept = Kept()
                connection.open(request_head(path, "x", "http"), kept).end()
                while not (kept.heads and kept.heads[-1][1]) and (data := await reader.read(1 << 16)):
                    connection.receive(data)
                if data:
                    assert parse_trailers(kept.heads[-1][0]).code == code
                    answered += 1
        assert 0 < answered < 500


async def test_a_call_ends_by_its_deadline() -> None:
    async with Running() as running, connected(running.address) as (reader, writer):
        connection, kept = Http2Connection(writer.write), Kept()
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
        ([*request_head("/x", "x", "http"), (b"connection", b"close")], b"400"),
        ([*request_head("/x", "x", "http"), (b"X-Name", b"x")], b"400"),
        ([(b":path", b"/y"), *request_head("/x", "x", "http")], b"400"),
        ([(b":status", b"200"), *request_head("/x", "x", "http")], b"400"),
        ([*request_head("/x", "x", "http"), (b"a b", b"x")], b"400"),
        ([*request_head("/x", "x", "http"), (b"name", b"x\r\ny: z")], b"400"),
        ([each for each in request_head("/x", "x", "http") if each[0] != b":scheme"], b"400"),
        ([each for each in request_head("/x", "x", "http") if each[0] != b":path"], b"400"),
        ([*request_head("/x", "x", "http"), (b":path", b"/y")], b"400"),
        ([(b":method", b"POST"), (b"te", b"gzip"), (b"content-type", b"application/grpc")], b"400"),
    ],
)
async def test_what_is_no_call_is_told_in_http_s_words(head: Any, status: bytes) -> None:
    async with Running() as running, connected(running.address) as (reader, writer):
        connection, kept = Http2Connection(writer.write), Kept()
        writer.write(connection.opening)
        connection.open(head, kept)
        async with asyncio.timeout(WAIT_S):
            while not kept.heads:
                connection.receive(await reader.read(1 << 16))
        assert kept.heads == [([(b":status", status)], True)]


# -- strangers


def _client_hello() -> bytes:
    """Returns the first bytes that the ssl library sends."""
    context = ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
    context.set_alpn_protocols(["h2"])
    outgoing = ssl.MemoryBIO()
    session = context.wrap_bio(ssl.MemoryBIO(), outgoing, server_hostname="decode-1.worker.pinyon")
    with suppress(ssl.SSLWantReadError):
        session.do_handshake()
    return outgoing.read()


async def test_who_does_not_say_who_it_is_is_closed_in_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The client begins no call, or does not end its handshake."""
    monkeypatch.setattr(listener, "HANDSHAKE_S", 0.2)
    monkeypatch.setattr("pinyon.runtime.http2.server.IDLE_S", 0.2)
    plain = (b"", PREFACE[:5], PREFACE + b"\0\0\xf0\x04\0\0\0\0\0")
    for tls, words in ((None, plain), (TestAuthority(tmp_path).tls("worker", "decode-1"), (b"", _client_hello()[:7]))):
        async with Running(tls) as running:
            for said in words:
                async with connected(running.address) as (reader, writer):
                    writer.write(said)
                    await read_all(reader)
            await until(lambda running=running: running.listener.connections == 0)  # type: ignore[misc]
            assert not running.listener._handshakes


async def test_a_server_of_tls_that_knows_no_http2_is_named(tmp_path: Path) -> None:
    authority = TestAuthority(tmp_path)
    server_tls = authority.tls("worker", "decode-1")
    context = server_context(server_tls.certificate, server_tls.key)  # this context knows HTTP/1.1 alone
    server = await asyncio.start_server(lambda *_: None, "127.0.0.1", 0, ssl=context)
    async with server:
        address = f"127.0.0.1:{server.sockets[0].getsockname()[1]}"
        channels = Channels(authority.tls("lb", "lb-7"))
        dialed = Dialed(address, METHOD, WAIT_S, channels.sessions_to(peer_name("worker", "decode-1")))
        with pytest.raises(Unavailable) as failed:
            await once(dialed)
        assert "not HTTP/2" in failed.value.message


async def test_there_is_an_end_to_connections(monkeypatch: pytest.MonkeyPatch) -> None:
    """Connections with a call are not displaced."""
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 2)
    async with Running() as running, calling(running.address), calling(running.address):
        await until(lambda: len(running.worker.seen) == 2)
        async with connected(running.address) as (reader, _):
            assert await read_all(reader) == b""
        assert running.listener.connections == 2
    assert running.listener.connections == 0


@asynccontextmanager
async def calling(address: str, opened: OpenSession = open_session) -> AsyncIterator[Any]:
    """Yields an open call that no peer ends."""
    call = opened(address, METHOD.path, Ask.SerializeToString, Answer.FromString)
    try:
        await call.wait_for_connection()
        yield call
    finally:
        await call.close()


@pytest.mark.parametrize("tls", [False, True])
@pytest.mark.parametrize("said", ["nothing", "a part", "no call", "grpcio's"])
async def test_silent_sockets_lock_nobody_out(
    tls: bool, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The silent sockets do not end existing calls either. No time passes that would end the sockets."""
    monkeypatch.setattr(listener, "HANDSHAKE_S", 10 * WAIT_S)
    monkeypatch.setattr("pinyon.runtime.http2.protocol.TICK_S", 10 * WAIT_S)
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 8)
    authority = TestAuthority(tmp_path)
    opening = _client_hello() if tls else Http2Connection(lambda _: None).opening
    words = {
        "nothing": b"",
        "a part": opening[:20],
        "no call": opening,
        "grpcio's": b"\x16\x03\x01\0\1x" if tls else PREFACE + settings({}),
    }
    opened = open_session
    if tls:
        opened = Channels(authority.tls("lb", "lb-7")).sessions_to(peer_name("worker", "decode-1"))
    async with Running(authority.tls("worker", "decode-1") if tls else None) as running, AsyncExitStack() as stack:
        call = await stack.enter_async_context(calling(running.address, opened))
        await call.write(Ask())
        assert await call.read() == Answer()
        silent = []
        for _ in range(20):
            reader, writer = await stack.enter_async_context(connected(running.address))
            writer.write(words[said])
            silent.append(reader)
        assert await once(Dialed(running.address, METHOD, WAIT_S, opened)) == 1
        await call.write(Ask())
        assert await call.read() == Answer()
        await asyncio.gather(*map(read_all, silent[:18]))  # the share of their address is two
        await until(lambda: running.listener.connections <= 4)


async def test_silent_sockets_of_many_addresses_make_room(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each address keeps within its share, and together the addresses have all places."""
    monkeypatch.setattr("pinyon.runtime.http2.protocol.TICK_S", 10 * WAIT_S)
    monkeypatch.setattr(listener, "HANDSHAKE_S", 10 * WAIT_S)
    monkeypatch.setattr(listener, "CONNECTIONS_MAX", 8)
    async with Running() as running, AsyncExitStack() as stack:
        host, _, port = running.address.rpartition(":")
        silent = []
        for number in range(8):
            reader, writer = await asyncio.open_connection(
                host, int(port), local_addr=(f"127.0.0.{2 + number // 2}", 0)
            )
            stack.callback(writer.close)
            silent.append(reader)
        await until(lambda: running.listener.connections == 8)
        assert await once(Dialed(running.address, METHOD, WAIT_S)) == 1
        await read_all(silent[0])
        await until(lambda: running.listener.connections == 7)


@pytest.mark.parametrize("tls", [False, True])
def test_silent_sockets_give_their_places_back_in_uvloop(
    tls: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The services run on uvloop, which tells less about connections whose tasks are cancelled."""
    uvloop.run(asyncio.wait_for(test_silent_sockets_lock_nobody_out(tls, "no call", tmp_path, monkeypatch), 2 * WAIT_S))


async def test_a_connection_without_a_call_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pinyon.runtime.http2.server.IDLE_S", 0.3)
    async with Running() as running, connected(running.address) as (reader, writer):
        writer.write(Http2Connection(lambda _: None).opening)
        answers = asyncio.ensure_future(reader.read())
        async with asyncio.timeout(WAIT_S):
            while not answers.done():  # the client is there, and says so
                writer.write(frame(6, 1, 0, b"\0" * 8))
                await asyncio.wait({answers}, timeout=0.1)
        await until(lambda: running.listener.connections == 0)


async def test_a_connection_whose_calls_are_refused_ends(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("pinyon.runtime.http2.server.IDLE_S", 0.3)
    async with Running() as running, connected(running.address) as (reader, writer):
        connection, kept = Http2Connection(writer.write), Kept()
        writer.write(connection.opening)
        connection.open(request_head("/no/such", "x", "http"), kept).end()
        async with asyncio.timeout(WAIT_S):
            while data := await reader.read(1 << 16):  # pings are answered
                connection.receive(data)
        assert parse_trailers(kept.heads[-1][0]).code == "UNIMPLEMENTED"
        await until(lambda: running.listener.connections == 0)


async def test_what_breaks_the_protocol_is_told_and_closed() -> None:
    async with Running() as running, connected(running.address) as (reader, writer):
        writer.write(Http2Connection(lambda _: None).opening + frame(5, 4, 1, b"push"))
        answer = await read_all(reader)
        assert answer[-4 - len("push is off") - 4 :][:8] == b"\0\0\0\0\0\0\0\1"
        assert answer.endswith(b"push is off")


@pytest.mark.parametrize("said", [b"P", PREFACE, PREFACE + bytes(8), b"\x16\x03\x01"])
async def test_a_client_that_leaves_mid_handshake_holds_no_place(said: bytes, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(listener, "HANDSHAKE_S", 10 * WAIT_S)  # this limit does not end it
    async with Running() as running:
        async with connected(running.address) as (_, writer):
            writer.write(said)
            await writer.drain()
        await until(lambda: running.listener.connections == 0)
        assert not running.listener._handshakes


async def test_handshakes_that_fail_leave_no_place_taken(tmp_path: Path) -> None:
    """A load balancer with the wrong certificate dials every two seconds."""
    authority = TestAuthority(tmp_path)
    stranger = Channels(TestAuthority(tmp_path / "other").tls("lb", "lb-7"))
    friend = Channels(authority.tls("lb", "lb-7"))
    async with Running(authority.tls("worker", "decode-1")) as running:
        for channels, name in ((stranger, "decode-1"), (friend, "decode-2")):
            with pytest.raises(Unavailable):
                await once(Dialed(running.address, METHOD, WAIT_S, channels.sessions_to(peer_name("worker", name))))
        async with connected(running.address) as (reader, writer):
            writer.write(_client_hello())
            await reader.read(1)
        await until(lambda: running.listener.connections == 0)


def test_settings_without_end_cost_no_more_than_some() -> None:
    """The library hpack announces every change of the table's size in the next block of headers."""
    server = Http2Connection(lambda _: None, lambda stream, fields, end: Kept())
    server.receive(PREFACE + settings({}))
    for size in range(1000):
        server.receive(settings({1: size}))
    assert len(server._encoder.table_size_changes) <= 2
    assert len(server.headers(1, [(b"a", b"b")], end=False)) < 40


async def test_listening_everywhere_means_the_same_as_with_grpcio() -> None:
    for listen, host in (("0.0.0.0:0", "127.0.0.1"), ("[::]:0", "127.0.0.1"), ("localhost:0", "localhost")):
        async with Running(listen=listen) as running:
            port = running.address.rpartition(":")[2]
            assert await once(Dialed(f"{host}:{port}", METHOD, WAIT_S)) == 1
            if host == "127.0.0.1":
                assert await once(Dialed(f"[::1]:{port}", METHOD, WAIT_S)) == 1


@pytest.mark.parametrize("name", ["no..dots", "a" * 64])
async def test_a_name_that_cannot_be_one_is_nobody(name: str) -> None:
    with pytest.raises(Unavailable):
        await once(Dialed(f"{name}:80", METHOD, WAIT_S))


async def test_whoever_has_just_come_is_let_go_when_the_server_ends() -> None:
    """The server ends before the task that is to serve the connection has taken its first step."""
    async with Running() as running:
        for hello in (Http2Connection(lambda _: None).opening, b"nonsense"):
            client, theirs = socket.socketpair()
            with client:
                client.sendall(hello)
                running.listener._enter(theirs, "")
                await running.listener.close()
                assert running.listener.connections == 0
                assert theirs.fileno() == -1


# -- peers that are not there any more


async def test_a_peer_that_falls_silent_is_gone_soon() -> None:
    """The peer is connected, and then says nothing, not even to a ping."""
    with socket.create_server(("127.0.0.1", 0)) as listener:
        listener.setblocking(False)
        loop = asyncio.get_running_loop()
        dialed = Dialed(f"127.0.0.1:{listener.getsockname()[1]}", METHOD, WAIT_S)

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


async def test_a_peer_without_a_call_may_be_silent_for_longer() -> None:
    async with Running() as running, connected(running.address) as (reader, writer):
        connection, kept = Http2Connection(writer.write), Kept()
        writer.write(connection.opening)
        stream = connection.open(request_head(METHOD.path, "x", "http"), kept)
        async with asyncio.timeout(WAIT_S):
            await running.worker.begun.wait()
            (protocol,) = running.server._server.protocols  # type: ignore[union-attr]
            assert protocol.dead_ticks == DEAD_TICKS
            stream.end()
            while not (kept.heads and kept.heads[-1][1]):
                connection.receive(await reader.read(1 << 16))
            await until(lambda: protocol.dead_ticks == IDLE_DEAD_TICKS)


class FakeTransport:
    def __init__(self) -> None:
        self.written: list[bytes] = []
        self.aborted = False

    def write(self, data: bytes) -> None:
        self.written.append(data)

    def get_write_buffer_size(self) -> int:
        return 0

    def is_closing(self) -> bool:
        return False

    def close(self) -> None:
        """Leaves what was written waiting for a peer that reads nothing."""

    def abort(self) -> None:
        self.aborted = True


async def test_who_reads_nothing_does_not_keep_a_closed_connection() -> None:
    protocol, transport, loop = Http2Protocol(Http2Connection), FakeTransport(), asyncio.get_running_loop()
    protocol.connection_made(transport)  # type: ignore[arg-type]
    protocol.close("it broke the rules")
    looks = 0
    while not transport.aborted and looks < 40:
        looks += 1
        protocol._tick.cancel()  # type: ignore[union-attr]
        protocol._next_s = loop.time()
        protocol._look()
    protocol._tick.cancel()  # type: ignore[union-attr]
    assert looks == DEAD_TICKS + 1


@pytest.mark.parametrize("late_s", [0.0, 0.6])
@pytest.mark.parametrize("answers", [True, False])
async def test_silence_is_told_from_having_been_away(
    late_s: float, answers: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A loop that is late at every tick notices dead peers too, and a peer that was not pinged is not thought dead."""
    protocol, transport, loop = Http2Protocol(Http2Connection), FakeTransport(), asyncio.get_running_loop()
    now_s = loop.time()
    monkeypatch.setattr(loop, "time", lambda: now_s)
    protocol.connection_made(transport)  # type: ignore[arg-type]
    looks = asked = 0
    try:
        while not transport.aborted and looks < 40:
            looks += 1
            protocol._tick.cancel()  # type: ignore[union-attr]
            protocol._next_s = now_s - late_s
            protocol._look()
            pings = transport.written.count(frame(6, 0, 0, bytes(8)))
            if answers and pings > asked:
                protocol.data_received(settings({}) if not asked else frame(6, 1, 0, bytes(8)))
            asked = pings
    finally:
        protocol._tick.cancel()  # type: ignore[union-attr]
        monkeypatch.undo()
    assert transport.aborted != answers
    assert asked
    if not answers:
        assert looks == (DEAD_TICKS + 1 if not late_s else EXCUSED + 2)


@pytest.mark.parametrize("ends", [True, False])
async def test_many_small_messages_let_others_have_their_turn(ends: bool) -> None:
    class Counting(Kept):
        count = 0

        def message(self, message: bytes) -> None:
            self.count += 1

    counting = Counting()
    protocol = Http2Protocol(lambda write: Http2Connection(write, lambda *_: counting))
    first, last = socket.socketpair()
    with first, last:
        transport, _ = await asyncio.get_running_loop().create_connection(lambda: protocol, sock=first)
        client = Http2Connection(lambda _: None)
        head = client.headers(1, request_head(METHOD.path, "x", "http"), end=False)
        messages = frame(0, 0, 1, bytes(5 * 1000)) * 40
        protocol.data_received(PREFACE + settings({}) + head + messages)
        assert 0 < counting.count < 20_000
        if ends:
            protocol.close()
            seen = counting.count
            for _ in range(20):
                await asyncio.sleep(0)
            assert counting.count == seen
        else:
            await until(lambda: counting.count == 40_000)
            assert transport.is_reading()
            protocol.close()
        await asyncio.sleep(0)


async def test_a_caller_that_falls_silent_is_gone_soon() -> None:
    async with Running() as running, connected(running.address) as (_, writer):
        said: list[bytes] = []
        client = Http2Connection(said.append)
        client.open(request_head(METHOD.path, "x", "http"), Kept())
        writer.write(client.opening + b"".join(said))
        async with asyncio.timeout(WAIT_S):
            await running.worker.begun.wait()
            await running.worker.ended.wait()
        await until(lambda: running.listener.connections == 0)


async def test_a_loop_that_is_held_up_loses_nobody() -> None:
    """The loop reads grpcio's answer to a ping late; that is no reason to end the connection."""
    async with Running() as running, grpc.aio.insecure_channel(running.address) as channel:
        call = worker_pb2_grpc.WorkerServiceStub(channel).Session()
        await call.write(Ask())
        await call.read()
        time.sleep(2.5)
        await call.write(Ask())
        assert await call.read() == Answer()
        call.cancel()


async def test_calls_in_flight_end_with_the_server_and_not_earlier() -> None:
    for seconds in (0.0, WAIT_S):
        async with Running() as running:
            finish = asyncio.Event()

            async def says(finish: asyncio.Event = finish) -> AsyncIterator[Ask]:
                yield Ask()
                await finish.wait()

            got: list[Answer] = []
            dialed = Dialed(running.address, METHOD, WAIT_S)
            call = asyncio.ensure_future(dialed.run(got.append, says()))  # type: ignore[arg-type]
            await until(lambda got=got: bool(got))  # type: ignore[misc]
            draining = asyncio.ensure_future(running.server.drain(seconds))
            if seconds:
                await until(lambda: not running.listener._bound)
                assert not call.done()
                finish.set()
                await call
            else:
                with pytest.raises(Unavailable):
                    await call
            await asyncio.wait_for(draining, WAIT_S)


async def test_what_was_said_last_arrives_though_the_server_ends() -> None:
    """The message is larger than a window, so it is under way when its handler has ended."""
    text = "x" * (2 << 20)

    class Last(Worker):
        async def Session(self, _: Any, context: Any) -> None:
            stream = Accepted[Answer, Ask](context, WAIT_S)
            await stream.first(WAIT_S)
            self.begun.set()
            answer = Answer()
            answer.updates.add().error.message = text
            await stream.write(answer)

    async with Running(worker=Last()) as running:
        got: list[Answer] = []
        goes_on = asyncio.Event()

        async def take(answer: Answer) -> None:
            got.append(answer)

        async def says() -> AsyncIterator[Ask]:
            yield Ask()
            await goes_on.wait()

        call = asyncio.ensure_future(
            Dialed(running.address, METHOD, WAIT_S).run(take, says())  # type: ignore[arg-type]
        )
        await running.worker.begun.wait()
        await running.server.drain(WAIT_S)
        await call
        assert [each.updates[0].error.message == text for each in got] == [True]


async def test_a_call_that_ignores_its_end_does_not_delay_the_server(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr("pinyon.runtime.http2.server.FAREWELL_S", 0.05)
    leave = asyncio.Event()

    class Stubborn(Worker):
        async def Session(self, _: Any, context: Any) -> None:
            self.begun.set()
            while not leave.is_set():
                with suppress(asyncio.CancelledError):
                    await leave.wait()
            self.ended.set()

    async with Running(worker=Stubborn()) as running:
        call = asyncio.ensure_future(once(Dialed(running.address, METHOD, WAIT_S)))
        await running.worker.begun.wait()
        with caplog.at_level(logging.WARNING):
            async with asyncio.timeout(WAIT_S):
                await running.server.drain(0)
        assert "go on although" in caplog.text
        with pytest.raises(Unavailable):
            await call
        leave.set()
        await running.worker.ended.wait()


async def test_empty_messages_that_nobody_takes_end_with_the_window() -> None:
    connection = Http2Connection(lambda _: None, lambda stream, fields, end: Kept(), stream_window=20_000)
    said: list[bytes] = []
    client = Http2Connection(said.append)
    stream = client.open(request_head(METHOD.path, "x", "http"), Kept())
    connection.receive(client.opening + b"".join(said))
    sent = 0
    while connection.streams:
        sent += 1
        said.clear()
        stream.send(b"")
        stream.send_window = client.send_window = 1000  # whatever it is told
        connection.receive(b"".join(said))
    assert sent <= 20_000 / 5 + 1


async def test_nothing_is_left_of_connections_of_either_kind() -> None:
    def descriptors() -> int:
        return len(os.listdir("/proc/self/fd"))

    async with Running() as running:
        await once(Dialed(running.address, METHOD, WAIT_S))
        await status(running.address)
        await until(lambda: running.listener.connections == 0)
        before = descriptors()
        for _ in range(20):
            await once(Dialed(running.address, METHOD, WAIT_S))
            await status(running.address)
            async with connected(running.address) as (_, writer):
                writer.write(b"nonsense")
        await until(lambda: running.listener.connections == 0 and descriptors() <= before)
        assert not running.listener._handshakes
