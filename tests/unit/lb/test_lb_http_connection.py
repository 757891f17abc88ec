"""One connection between a fake transport and a fake application: order, bounds, and the last word."""

from __future__ import annotations

import asyncio
import re
import weakref
from contextlib import ExitStack

import pytest
from prometheus_client import CollectorRegistry, Gauge

from pinyon.core.errors import Unauthenticated
from pinyon.frontdoor.app import error_answer
from pinyon.http.answer import JSON
from pinyon.http.budget import Budget, HttpLimits
from pinyon.http.connection import DISCARD_BYTES, READ_AHEAD_BYTES, ServerConnection
from pinyon.http.peers import PeerPlaces, TrustedProxies
from pinyon.http.state import HttpState

POST = b"POST /%b HTTP/1.1\r\nhost: lb\r\ncontent-length: %d\r\n\r\n%b"
DATE = b"date: now\r\n"


class FakeTransport:
    def __init__(self, protocol: ServerConnection) -> None:
        self.protocol = protocol
        self.written = bytearray()
        self.reading = True
        self.closed = ""
        self.eof = False
        protocol.connection_made(self)

    def get_extra_info(self, name: str) -> None:
        return None

    def write(self, data: bytes) -> None:
        assert not self.closed
        self.written += data

    def can_write_eof(self) -> bool:
        return True

    def write_eof(self) -> None:
        self.eof = True

    def is_closing(self) -> bool:
        return bool(self.closed)

    def pause_reading(self) -> None:
        assert self.reading
        self.reading = False

    def resume_reading(self) -> None:
        assert not self.reading
        self.reading = True

    def close(self) -> None:
        self._end("close")

    def abort(self) -> None:
        self._end("abort")

    def _end(self, how: str) -> None:
        if not self.closed:
            self.closed = how
            self.protocol.connection_lost(None)

    @property
    def statuses(self) -> list[int]:
        return [int(status) for status in re.findall(rb"HTTP/1\.1 (\d+) ", self.written)]


class FakeExchange:
    def __init__(self, path: str) -> None:
        self.path = path
        self.fields = b""
        self.holder = path[3:] if path.startswith("/of") else ""
        self.error = Unauthenticated("no key") if path == "/refused" else None
        self.guarded = True
        self.plain = path == "/plain"


class FakeApp:
    """An application that answers with path and body; ``/held`` when told to, ``/stream`` in two parts."""

    def __init__(self) -> None:
        self.go = asyncio.Event()
        self.ended: list[str] = []
        self.refusals: list[int] = []

    def open(self, head):
        return FakeExchange(head.path)

    def answer(self, exchange, body, reply) -> None:
        reply.whole(200, b"plain")

    async def serve(self, exchange, body, reply) -> None:
        try:
            if exchange.path == "/held":
                await self.go.wait()
            if exchange.path == "/stream":
                reply.begin(JSON)
                await reply.send(b"one")
                await self.go.wait()
                await reply.end(b"two")
            elif exchange.path.startswith("/empty"):
                status = int(exchange.path[-3:])
                if exchange.path.startswith("/emptystream"):
                    reply.begin(JSON, status=status)
                    await reply.send(b"one")
                    await reply.end(b"two")
                else:
                    reply.whole(status, b"one")
            elif exchange.path != "/silent":
                reply.whole(200, exchange.path.encode() + b" " + bytes(body[:20]))
        except asyncio.CancelledError:
            self.ended.append("cancelled")
            raise
        self.ended.append(exchange.path)

    def refusal(self, error, *, named):
        return error_answer(error)

    def refused(self, exchange, status) -> None:
        self.refusals.append(status)


class World:
    def __init__(self, budget: int = 1 << 20, **limits) -> None:
        self.app = FakeApp()
        self.shared = HttpState(
            self.app,
            HttpLimits(**limits),
            Budget(budget),
            Gauge("connections", "open", registry=CollectorRegistry()),
            TrustedProxies(),
            False,
            PeerPlaces(8),
            PeerPlaces(8),
            date=DATE,
        )

    def connect(self) -> FakeTransport:
        return FakeTransport(ServerConnection(self.shared, asyncio.get_running_loop()))

    async def settle(self) -> None:
        """Lets everything happen that needs no new event."""
        for _ in range(20):
            await asyncio.sleep(0)

    async def until(self, condition) -> None:
        async with asyncio.timeout(60):
            while not condition():  # noqa: ASYNC110
                await asyncio.sleep(0.005)  # gives timers a chance without burning seconds of CPU


@pytest.fixture
async def world() -> World:
    return World()


@pytest.fixture
async def transport(world: World) -> FakeTransport:
    return world.connect()


async def test_a_connection_keeps_nothing_of_its_arrival():
    """The place before a handshake, which its arrival gives back, would be a third of an idle connection's memory."""
    world, place, arrived = World(), ExitStack(), []
    place.callback(arrived.append, True)
    kept = weakref.ref(place)
    transport = FakeTransport(ServerConnection(world.shared, asyncio.get_running_loop(), place.close))
    del place
    assert arrived
    assert not transport.closed
    assert kept() is None


async def test_answers_come_in_order_and_one_at_a_time(world, transport):
    transport.protocol.data_received(POST % (b"held", 1, b"1") + POST % (b"b", 1, b"2") + POST % (b"plain", 0, b""))
    transport.protocol.data_received(POST % (b"c", 1, b"3"))
    await world.settle()
    assert transport.written == b""
    world.app.go.set()
    await world.settle()
    assert re.findall(rb"\r\n\r\n([^\r]+?)(?=HTTP|\Z)", transport.written) == [b"/held 1", b"/b 2", b"plain", b"/c 3"]
    assert world.shared.budget.used == 0
    transport.abort()


async def test_the_bytes_of_answers(world, transport):
    """The bytes are what clients have always seen."""
    world.app.go.set()
    for request, answer in [
        (b"GET /plain HTTP/1.1\r\nhost: lb\r\n\r\n",
         b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-type: application/json\r\ncontent-length: 5\r\n\r\nplain"),
        (b"HEAD /plain HTTP/1.1\r\nhost: lb\r\n\r\n",
         b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-type: application/json\r\ncontent-length: 5\r\n\r\n"),
        (b"GET /stream HTTP/1.1\r\nhost: lb\r\n\r\n",
         b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-type: application/json\r\ntransfer-encoding: chunked\r\n\r\n"
         b"3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"),
        (b"GET /stream HTTP/1.1\r\nhost: lb\r\nconnection: close\r\n\r\n",
         b"HTTP/1.1 200 OK\r\ndate: now\r\ncontent-type: application/json\r\nconnection: close\r\n"
         b"transfer-encoding: chunked\r\n\r\n3\r\none\r\n3\r\ntwo\r\n0\r\n\r\n"),
    ]:  # fmt: skip
        transport.written.clear()
        transport.protocol.data_received(request)
        await world.settle()
        assert transport.written == answer
    assert transport.closed == "close"


@pytest.mark.parametrize("path", ["empty204", "empty304", "emptystream204", "emptystream304"])
async def test_answers_that_have_no_body_get_none(world, transport, path: str):
    transport.protocol.data_received(POST % (path.encode(), 0, b"") + POST % (b"next", 1, b"2"))
    await world.settle()
    status = int(path[-3:])
    assert transport.statuses == [status, 200]
    first, after = transport.written.split(b"\r\n\r\n", 1)
    assert after.startswith(b"HTTP/1.1 200 OK\r\n"), "the next answer, and nothing before it"
    assert b"content-length" not in first
    assert b"transfer-encoding" not in first
    transport.abort()


async def test_http_1_0_gets_no_chunks(world, transport):
    world.app.go.set()
    transport.protocol.data_received(b"GET /stream HTTP/1.0\r\n\r\n")
    await world.settle()
    assert transport.written.endswith(b"\r\nconnection: close\r\n\r\nonetwo")
    assert transport.closed == "close"


async def test_a_stalled_request_does_not_spoil_the_answer_before_it():
    world = World(head_s=0.01, arrival_s=0.01)
    transport = world.connect()
    transport.protocol.data_received(
        b"GET /stream HTTP/1.1\r\nhost: lb\r\n\r\n" + b"POST /b HTTP/1.1\r\nhost: lb\r\nco"
    )
    await world.settle()
    loop = asyncio.get_running_loop()
    late = loop.time() + 0.05  # the second deadline would have passed by then, if it ran already
    await world.until(lambda: loop.time() > late)
    world.app.go.set()
    await world.settle()
    first, _, rest = transport.written.partition(b"0\r\n\r\n")
    assert first.endswith(b"3\r\none\r\n3\r\ntwo\r\n")
    await world.until(lambda: transport.eof)
    assert transport.statuses == [200, 408]
    assert not rest.startswith(b"HTTP/1.1 200")
    transport.abort()


@pytest.mark.parametrize("size", [READ_AHEAD_BYTES // 2, READ_AHEAD_BYTES * 2])
async def test_pipelined_bytes_are_bounded_and_reading_never_pauses(size):
    world = World(budget=READ_AHEAD_BYTES * 2)
    transport = world.connect()
    transport.protocol.data_received(POST % (b"held", 0, b""))
    many = POST % (b"plain", 0, b"") * 100
    for _ in range(size // len(many)):
        transport.protocol.data_received(many)
        assert transport.reading
        assert world.shared.budget.used <= READ_AHEAD_BYTES
    world.app.go.set()
    if size > READ_AHEAD_BYTES:  # none of them is answered in this case
        await world.until(lambda: transport.closed)
        assert transport.statuses == [200]
        assert b"connection: close\r\n" in transport.written
    else:
        await world.until(lambda: not world.shared.budget.used)
        assert len(transport.statuses) == 1 + size // len(many) * 100
        transport.abort()


async def test_pipelined_answers_wait_for_a_client_that_does_not_read():
    world = World(budget=READ_AHEAD_BYTES * 2)
    transport = world.connect()
    transport.protocol.pause_writing()
    many = POST % (b"plain", 0, b"") * 1000
    pieces = 0
    while transport.reading:
        transport.protocol.data_received(many)
        pieces += 1
    await world.settle()
    assert transport.statuses == []
    assert world.shared.budget.used <= READ_AHEAD_BYTES + len(many)
    transport.protocol.resume_writing()
    await world.until(lambda: not world.shared.budget.used)
    assert transport.reading
    assert transport.statuses == [200] * (1000 * pieces)
    transport.abort()


async def test_a_slow_reader_counts_as_idle_once_it_has_read():
    """The deadline of an idle connection pauses while answers wait for their client, and runs again afterwards."""
    world = World(idle_s=0.05)
    transport = world.connect()
    write = transport.write

    def write_too_much(data: bytes) -> None:
        write(data)
        transport.protocol.pause_writing()

    transport.write = write_too_much
    transport.protocol.data_received(POST % (b"plain", 0, b""))
    assert transport.statuses == [200]
    await asyncio.sleep(0.1)
    assert not transport.closed
    transport.protocol.resume_writing()
    await world.until(lambda: transport.closed)


@pytest.mark.parametrize("how", ["lost", "half-closed"])
async def test_a_client_that_leaves_cancels_its_request(world, transport, how):
    transport.protocol.data_received(POST % (b"held", 3, b"abc") + b"GET")
    await world.settle()
    if how == "lost":
        transport.abort()
    else:
        assert not transport.protocol.eof_received()
        assert transport.closed
    await world.settle()
    assert world.app.ended == ["cancelled"]
    assert (world.shared.budget.used, world.shared.admitted, len(world.shared.connections)) == (0, 0, 0)


@pytest.mark.parametrize("path", [b"held", b"any"])
async def test_a_client_that_leaves_before_its_request_leaves_nothing(world, transport, path):
    transport.protocol.data_received(POST % (path, 3, b"abc"))
    assert (world.shared.budget.used, len(world.shared.tasks)) == (3, 1)
    transport.abort()
    await world.settle()
    assert world.app.ended == []
    assert (world.shared.budget.used, len(world.shared.tasks), len(world.shared.connections)) == (0, 0, 0)


async def test_a_refused_request_costs_no_body(world, transport):
    """The answer goes out with the head; a small body is passed over, a large one ends the connection."""
    head, body = (POST % (b"refused", 1000, b"")), b"x" * 1000
    transport.protocol.data_received(head)
    assert transport.statuses == [401]
    transport.protocol.data_received(body[:700])
    assert world.shared.budget.used == 0
    transport.protocol.data_received(body[700:] + POST % (b"plain", 0, b""))
    assert transport.statuses == [401, 200]
    transport.protocol.data_received(POST % (b"refused", DISCARD_BYTES + 1, b""))
    assert transport.statuses == [401, 200, 401]
    assert transport.eof
    transport.protocol.data_received(POST % (b"plain", 0, b""))
    assert transport.statuses == [401, 200, 401]
    assert world.shared.budget.used == 0
    assert world.app.refusals == [401, 401]
    transport.abort()


async def test_a_client_is_told_to_continue_only_if_its_body_is_wanted():
    world = World(body_bytes=2000)
    for path, length, answer in [(b"a", 1000, 100), (b"refused", 1000, 401), (b"a", 3000, 413)]:
        transport = world.connect()
        transport.protocol.data_received(
            b"POST /%b HTTP/1.1\r\nhost: lb\r\nexpect: 100-continue\r\ncontent-length: %d\r\n\r\n" % (path, length)
        )
        assert transport.statuses == [answer]
        assert transport.eof == (answer != 100), "who was refused may or may not send its body"
        transport.abort()


async def test_all_bodies_together_are_bounded():
    world = World(budget=10_000)
    first, second, third = (world.connect() for _ in range(3))
    first.protocol.data_received(POST % (b"held", 6000, b"x" * 6000))
    second.protocol.data_received(POST % (b"a", 6000, b"x" * 3000))
    assert world.shared.budget.used == 9000
    third.protocol.data_received(POST % (b"a", 2000, b"x" * 900))
    assert third.statuses == []
    third.protocol.data_received(b"x" * 1100)
    assert third.statuses == [503]
    assert b"retry-after: 1\r\n" in third.written
    world.app.go.set()
    await world.settle()
    second.protocol.data_received(b"x" * 3000)
    await world.settle()
    assert second.statuses == [200]
    for transport in (first, second, third):
        transport.abort()
    assert world.shared.budget.used == 0


async def test_nobody_holds_more_than_he_leaves_free():
    world = World(budget=10_000)
    unfinished = POST.replace(b"%b HTTP", b"of%b HTTP")

    def send(name: bytes, size: int) -> FakeTransport:
        transport = world.connect()
        transport.protocol.data_received(unfinished % (name, size + 1, b"x" * size))
        return transport

    anna = [send(b"anna", 2000) for _ in range(3)]
    assert [transport.statuses for transport in anna] == [[], [], [503]]
    bert = [send(b"bert", 1600) for _ in range(2)]
    assert [transport.statuses for transport in bert] == [[], [503]]
    assert world.shared.budget.used == 5600
    anna[0].abort()
    assert [send(b"bert", 1600).statuses, send(b"carl", 2000).statuses] == [[], []]
    for connection in list(world.shared.connections):
        connection.abort()
    assert world.shared.budget.used == 0
    assert world.shared.budget.take(5000, "anna"), "nothing is remembered of what is not held any more"


async def test_a_connection_holds_in_the_name_of_whom_it_serves_now():
    world = World(budget=10_000)
    transport = world.connect()
    for name in (b"anna", b"bert"):
        transport.protocol.data_received(POST % (b"of" + name, 4000, b"x" * 4000))
        await world.settle()
    transport.protocol.data_received(POST % (b"ofcarl", 4001, b"x" * 4000))
    assert (transport.statuses, world.shared.budget.used) == ([200, 200], 4000)
    assert world.shared.budget.take(2000, "bert")
    assert not world.shared.budget.take(1500, "carl")


async def test_what_is_pipelined_over_the_budget_is_dropped():
    """The answer under way still comes, as the last one."""
    world = World(budget=1000)
    transport = world.connect()
    transport.protocol.data_received(POST % (b"held", 500, b"x" * 500))
    transport.protocol.data_received(POST % (b"b", 600, b"x" * 600))
    assert world.shared.budget.used == 500
    world.app.go.set()
    await world.settle()
    assert transport.statuses == [200]
    assert b"connection: close\r\n" in transport.written
    assert transport.closed == "close"


async def test_connections_over_the_limit_are_told_so():
    world = World(connections=2)
    first, second, third = (world.connect() for _ in range(3))
    assert (first.statuses, third.statuses) == ([], [503])
    third.abort()
    second.abort()
    assert world.connect().statuses == []
    assert world.shared.admitted == 2


async def test_an_answer_that_breaks_off_ends_the_connection(world, transport):
    transport.protocol.data_received(POST % (b"silent", 0, b""))
    await world.settle()
    assert transport.closed == "abort"


async def test_the_end_of_the_server_is_told_to_who_waits(world):
    waiting, streaming, arriving, idle = (world.connect() for _ in range(4))
    waiting.protocol.data_received(POST % (b"held", 0, b""))
    streaming.protocol.data_received(POST % (b"stream", 0, b""))
    arriving.protocol.data_received(POST % (b"a", 5, b"x"))
    idle.protocol.data_received(POST % (b"plain", 0, b""))
    await world.settle()
    for transport in (waiting, streaming, arriving, idle):
        transport.protocol.shutdown()
    assert (waiting.closed, streaming.closed, arriving.closed, idle.closed) == ("", "", "", "close")
    for transport in (waiting, streaming, arriving):
        transport.protocol.end()
    assert (waiting.statuses, streaming.statuses, arriving.statuses) == ([503], [200], [503])
    await world.settle()
    assert world.app.ended == ["cancelled", "cancelled"]
    assert not world.shared.tasks


async def test_a_new_connection_is_heard_before_the_server_ends(world):
    late, silent, half = (world.connect() for _ in range(3))
    request = POST % (b"plain", 0, b"")
    half.protocol.data_received(request[:9])
    for transport in (late, silent, half):
        transport.protocol.shutdown()
        assert transport.closed == ""
    late.protocol.data_received(request)
    half.protocol.data_received(request[9:])
    await world.settle()
    for transport in (late, half):
        assert transport.statuses == [200]
        assert b"connection: close" in transport.written.lower()
        assert transport.closed == "close"
    await world.until(lambda: silent.closed == "abort")
