"""Unary calls within the event loop: what they return and raise, with servers of either kind."""

from __future__ import annotations

import asyncio
from collections.abc import AsyncIterator
from typing import Any

import pytest
from hpack import Decoder, Encoder
from hypothesis import given
from hypothesis import strategies as st

from pinyon.api.kvstore.v1 import kvstore_pb2, kvstore_pb2_grpc
from pinyon.core.errors import DeadlineExceeded, NotFound, ResourceExhausted, Unavailable
from pinyon.runtime.grpc_server import GrpcServer
from pinyon.runtime.http2.calls import Http2Calls
from pinyon.runtime.http2.connection import REMEMBERED_MAX, STREAMS_MAX, Http2Connection
from pinyon.runtime.http2.heads import timeout_field
from pinyon.runtime.http2.stream import NOBODY, Field, Http2Stream
from pinyon.runtime.http2.wire import END_HEADERS, END_STREAM, HEAD_BYTES, HEADERS, ErrorCode, frame
from tests.waiting import eventually

WAIT_S = 60.0
SERVICE = kvstore_pb2.DESCRIPTOR.services_by_name["KvStoreService"]
Ask, Answer = kvstore_pb2.RemoveRequest, kvstore_pb2.RemoveResponse


class Node(kvstore_pb2_grpc.KvStoreServiceServicer):
    def __init__(self) -> None:
        self.gate = asyncio.Event()
        self.gate.set()
        self.under_way = self.most = self.cancelled = 0
        self.left_s: list[float] = []

    async def Remove(self, request: Any, context: Any) -> Any:
        self.under_way += 1
        self.most = max(self.most, self.under_way)
        self.left_s.append(context.time_remaining())
        try:
            if request.keys == b"none":
                raise NotFound("not here", field="keys")
            if request.keys == b"wait":
                await self.gate.wait()
            return Answer(removed=len(request.keys))
        except asyncio.CancelledError:
            self.cancelled += 1
            raise
        finally:
            self.under_way -= 1


class Place:
    def __init__(self, *, sessions: bool) -> None:
        self.sessions = sessions
        self.node = Node()

    async def serve(self, listen: str = "127.0.0.1:0") -> str:
        self.server = GrpcServer(listen, sessions=self.sessions)
        self.server.add(self.node, SERVICE)
        return await self.server.start()

    async def ask(self, keys: bytes, timeout_s: float = WAIT_S) -> int:
        path = f"/{SERVICE.full_name}/Remove"
        encode, decode = Ask.SerializeToString, Answer.FromString
        said = await self.calls.call(path, encode, decode, Ask(keys=keys), timeout_s)
        return int(said.removed)


@pytest.fixture(params=[True, False], ids=["loop", "grpcio"])
async def place(request: pytest.FixtureRequest, monkeypatch: pytest.MonkeyPatch) -> AsyncIterator[Place]:
    monkeypatch.setattr("pinyon.runtime.http2.client.CONNECT_S", WAIT_S)
    place = Place(sessions=request.param)
    place.calls = Http2Calls(await place.serve())
    yield place
    place.calls.close()
    await place.server.drain(0)


async def test_answers_and_errors_come_as_the_peer_gave_them(place: Place) -> None:
    assert await place.ask(b"abc", 20.0) == 3
    assert 0 < place.node.left_s[0] <= 20.0
    with pytest.raises(NotFound) as caught:
        await place.ask(b"none")
    assert (caught.value.message, caught.value.field) == ("not here", "keys")
    assert await place.ask(b"x" * 3_000_000) == 3_000_000, "more than the peer has room for at once"


async def test_more_calls_than_streams_wait_for_each_other(place: Place) -> None:
    place.node.gate.clear()
    calls = [asyncio.create_task(place.ask(b"wait")) for _ in range(3 * STREAMS_MAX)]
    await eventually(lambda: place.node.under_way == STREAMS_MAX, "as many as there are streams are under way")
    place.node.gate.set()
    assert await asyncio.gather(*calls) == [4] * len(calls)
    assert place.node.most == STREAMS_MAX
    assert not place.calls.under_way


async def test_a_late_or_cancelled_call_ends_alone(place: Place) -> None:
    place.node.gate.clear()
    patient, hasty = asyncio.create_task(place.ask(b"wait")), asyncio.create_task(place.ask(b"wait"))
    await eventually(lambda: place.node.under_way == 2, "both calls are under way")
    with pytest.raises(DeadlineExceeded):
        await place.ask(b"wait", 0.05)
    hasty.cancel()
    await eventually(lambda: place.node.cancelled == 2, "the peer knows that both are over")
    place.node.gate.set()
    assert await patient == 4
    with pytest.raises(ResourceExhausted):
        await place.ask(b"x" * (5 << 20))
    assert await place.ask(b"abc") == 3
    assert place.node.most == 3


async def test_a_peer_that_went_is_unavailable_until_it_is_back(place: Place) -> None:
    place.node.gate.clear()
    waiting = asyncio.create_task(place.ask(b"wait"))
    await eventually(lambda: place.node.under_way == 1, "the call is under way")
    await place.server.drain(0)
    with pytest.raises(Unavailable):
        await waiting
    with pytest.raises(Unavailable):
        await place.ask(b"abc")
    await place.serve(place.calls._address)
    assert await place.ask(b"abc") == 3
    place.calls.close()


async def test_who_asks_meanwhile_gets_the_same_connection() -> None:
    made = 0

    def count(reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        nonlocal made
        made += 1
        writer.close()

    server = await asyncio.start_server(count, "127.0.0.1", 0)
    place = Place(sessions=True)
    place.calls = Http2Calls(f"127.0.0.1:{server.sockets[0].getsockname()[1]}")
    said = await asyncio.gather(*[place.ask(b"abc") for _ in range(5)], return_exceptions=True)
    assert all(isinstance(each, Unavailable) for each in said)
    assert made == 1
    server.close()


@given(st.floats(1e-6, 1e6))
def test_a_deadline_is_sent_as_one_of_few(timeout_s: float) -> None:
    name, value = timeout_field(timeout_s)
    sent_s = int(value[:-1]) / 1e3
    assert name == b"grpc-timeout"
    assert value.endswith(b"m")
    assert len(value) <= 9
    assert len(value.rstrip(b"m").rstrip(b"0")) <= 2
    assert min(timeout_s, 99_000) <= sent_s <= max(0.001, 1.11 * timeout_s) + 1e-3


HEADS = st.lists(st.tuples(st.integers(0, 12), st.booleans()), max_size=60)


@given(HEADS)
def test_remembered_heads_are_those_that_were_sent(heads: list[tuple[int, bool]]) -> None:
    """The side that sends is read by hpack, the side that receives is written to by hpack, which remember no blocks."""
    got: list[list[Field]] = []

    def opened(stream: Http2Stream, fields: Any, end: bool) -> Any:
        got.append(list(fields))
        stream.reset(ErrorCode.CANCEL)
        return NOBODY

    sender, receiver = Http2Connection(lambda data: None), Http2Connection(lambda data: None, opened)
    receiver.receive(sender.opening)
    reader, writer = Decoder(), Encoder()
    for place, (number, large) in enumerate(heads):
        fields: list[Field] = [(b":path", b"/%d" % number), (b"te", b"trailers")]
        fields += [(b"large", b"%d" % number * 1500)] * large  # of which the table holds a few at most
        block = sender.headers(1, fields, end=True)[HEAD_BYTES:]
        assert [tuple(each) for each in reader.decode(block, raw=True)] == fields
        receiver.receive(frame(HEADERS, END_HEADERS | END_STREAM, 2 * place + 1, writer.encode(fields)))
        assert got[-1] == fields
        assert max(len(sender._encoded), len(receiver._decoded)) <= REMEMBERED_MAX
        receiver.tick()
