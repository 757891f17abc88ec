"""HTTP between regions in pieces: all of it arrives however it is cut and read, and the bytes under way are bounded."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.errors import InvalidArgument, PinyonError, ResourceExhausted, Unavailable
from pinyon.frontdoor.failures import REGION_FIELD, Broke, NoRoom
from pinyon.frontdoor.regions.raw_streams import PIECE_BYTES, WINDOW_BYTES, RawStreams, read_fields
from pinyon.frontdoor.upstreams.serving import PeerReply

sizes = st.integers(0, 3 * WINDOW_BYTES)


class Wire:
    """Both ends without a network: the test says when the serving side's messages are delivered."""

    def __init__(self) -> None:
        self.streams = RawStreams("eu", self._send)
        self.pieces: list[peer_pb2.RawPiece] = []
        self.messages: list[peer_pb2.SessionRequest] = []
        self.reply: PeerReply | None = None

    def _send(self, message: peer_pb2.SessionRequest) -> None:
        self.messages.append(message)
        for taken in message.raw_taken:
            assert self.reply is not None
            self.reply.taken(taken.bytes)

    def put(self, piece: peer_pb2.RawPiece) -> None:
        assert len(piece.data) <= PIECE_BYTES
        self.pieces.append(peer_pb2.RawPiece.FromString(piece.SerializeToString()))

    def hand_on(self) -> None:
        pieces, self.pieces = self.pieces, []
        self.streams.take(pieces)

    @property
    def under_way(self) -> int:
        return sum(len(piece.data) for piece in self.pieces)

    @property
    def cancelled(self) -> bool:
        return any(message.cancel_stream_ids for message in self.messages)


def open_stream(wire: Wire, body: bytes = b"{}"):
    answer = wire.streams.open(peer_pb2.RawHead(), body)
    wire.reply = PeerReply(wire, 1)  # type: ignore[arg-type]
    return answer


@settings(max_examples=60, deadline=None)
@given(st.lists(sizes.filter(bool), max_size=6), st.booleans(), st.data())
def test_an_answer_comes_as_it_was_sent(chunks: Sequence[int], reads_late: bool, data: st.DataObject) -> None:
    async def scenario() -> None:
        wire = Wire()
        answer = open_stream(wire)
        sent = [bytes([number % 256]) * size for number, size in enumerate(chunks)]

        async def serve() -> None:
            assert wire.reply is not None
            wire.reply.begin(b"text/plain", b"x-a: b\r\n", 201)
            for each in sent:
                await wire.reply.send(each)
                # One piece may go out with the last byte of room; nothing follows it until some is read.
                assert wire.under_way <= WINDOW_BYTES + max(chunks)
            await wire.reply.end(b"")

        serving = asyncio.ensure_future(serve())
        got = b""
        for _ in range(10_000):
            await asyncio.sleep(0)
            if not reads_late or data.draw(st.booleans()):
                wire.hand_on()
            if answer.has_head and (answer._size or answer.complete):
                piece = await answer.read()
                if not piece:
                    break
                got += piece
            if reads_late and serving.done():
                wire.hand_on()
        await serving
        assert got == b"".join(sent)
        assert (answer.status, answer.fields) == (201, [(b"content-type", b"text/plain"), (b"x-a", b"b")])
        assert answer.complete
        answer.close()
        assert not len(wire.streams)
        assert not wire.cancelled

    asyncio.run(scenario())


@given(sizes)
def test_a_body_goes_in_pieces_one_after_the_other(size: int) -> None:
    async def scenario() -> None:
        wire = Wire()
        body = bytes(range(256)) * (size // 256) + b"y" * (size % 256)
        open_stream(wire, body)
        got, at = b"", 0
        while at < len(wire.messages):
            message = wire.messages[at]
            at += 1
            for request in message.raw_requests:
                got += request.body
            for more in message.raw_bodies:
                assert 0 < len(more.data) <= PIECE_BYTES
                got += more.data
            assert len(wire.messages) - at <= 1  # at most one is on its way
            wire.streams.written(message)
        assert got == body

    asyncio.run(scenario())


@pytest.mark.parametrize("begun", [False, True])
@pytest.mark.parametrize(
    ("error", "before"),
    [
        (ResourceExhausted("full", field=REGION_FIELD), NoRoom),
        (InvalidArgument("wrong"), InvalidArgument),
        (Unavailable("gone"), Broke),
    ],
)
async def test_how_it_fails(error: PinyonError, before: type, begun: bool) -> None:
    wire = Wire()
    answer = open_stream(wire)
    assert wire.reply is not None
    if begun:
        wire.reply.begin(b"text/plain")
        await wire.reply.send(b"x")
    wire.reply.fail(error)
    wire.reply.fail(error)
    wire.hand_on()
    if begun:
        await answer.head()
        assert await answer.read() == b"x"
    with pytest.raises(Broke if begun else before) as failure:
        await (answer.read() if begun else answer.head())
    if begun:
        assert failure.value.begun
    assert not len(wire.streams)


@pytest.mark.parametrize(
    "pieces",
    [
        [peer_pb2.RawPiece(stream_id=1, data=b"x")],
        [peer_pb2.RawPiece(stream_id=1, end=True)],
        [peer_pb2.RawPiece(stream_id=1, answer=peer_pb2.RawAnswer(status=100))],
        [peer_pb2.RawPiece(stream_id=1, answer=peer_pb2.RawAnswer(status=200))] * 2,
        [peer_pb2.RawPiece(stream_id=1, answer=peer_pb2.RawAnswer(status=200, fields=b"a: b"))],
        [
            peer_pb2.RawPiece(stream_id=1, answer=peer_pb2.RawAnswer(status=204)),
            peer_pb2.RawPiece(stream_id=1, data=b"x"),
        ],
        [
            peer_pb2.RawPiece(stream_id=1, answer=peer_pb2.RawAnswer(status=200)),
            *[peer_pb2.RawPiece(stream_id=1, data=bytes(PIECE_BYTES))] * 8,
        ],
    ],
)
async def test_malformed_pieces_break_off_their_request(pieces) -> None:
    wire = Wire()
    answer = open_stream(wire)
    wire.streams.take(pieces)

    async def read_all() -> None:
        await answer.head()
        while await answer.read():
            pass

    with pytest.raises(Broke):
        await read_all()
    assert wire.cancelled
    assert not len(wire.streams)


@given(st.binary(max_size=64))
def test_any_fields_are_read_or_refused(lines: bytes) -> None:
    try:
        fields = read_fields(lines)
    except InvalidArgument:
        return
    assert b"".join(b"%b: %b\r\n" % field for field in fields) == lines
