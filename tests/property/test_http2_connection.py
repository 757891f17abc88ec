"""HTTP/2 connections against each other and the h2 library, in pieces of any size; and against invalid input."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import suppress
from random import Random

import pytest
from h2.config import H2Configuration
from h2.connection import H2Connection
from h2.events import (
    ConnectionTerminated,
    DataReceived,
    RequestReceived,
    ResponseReceived,
    SettingsAcknowledged,
    StreamEnded,
    StreamReset,
    TrailersReceived,
)
from hpack import Encoder
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.runtime.http2.connection import FRAME_BYTES, STREAMS_MAX, WORK_UNITS, Http2Connection
from pinyon.runtime.http2.heads import ANSWER, Http2RequestHead, parse_request, parse_trailers, request_head, trailers
from pinyon.runtime.http2.stream import Field, Http2Stream, StreamFailed
from pinyon.runtime.http2.wire import PREFACE, ConnectionFailed, ErrorCode, frame
from pinyon.runtime.http2.wire import settings as settings_frame
from tests.long import usually

PATH = "/pinyon.Test/Session"
HEAD = [*request_head(PATH, "peer", "http"), (b"some-bin", b"AP8"), (b"word", b"yes")]  # AP8: \0\xff in base64
SIZES = st.lists(st.one_of(st.integers(0, 300), st.integers(0, 200_000)), max_size=12)
SEEDS = st.integers(0, 1 << 32)
MANY = usually(60, long=3000)
STEPS = 100_000
"""The limit of steps in a conversation, after which it counts as stuck."""


class Kept:
    """A receiver that keeps its events, and accepts messages when the test says so."""

    def __init__(self) -> None:
        self.stream: Http2Stream
        self.messages: list[bytes] = []
        self.taken = 0
        self.heads: list[tuple[Sequence[Field], bool]] = []
        self.halves = 0
        self.errors: list[StreamFailed] = []

    def headed(self, fields: Sequence[Field], end: bool) -> None:
        self.heads.append((fields, end))

    def message(self, message: bytes) -> None:
        assert not self.errors
        assert not self.halves
        self.messages.append(message)

    def half_closed(self) -> None:
        self.halves += 1

    def refused(self, error: StreamFailed) -> None:
        pass

    def failed(self, error: StreamFailed) -> None:
        self.errors.append(error)

    def writable(self) -> None:
        pass

    def take(self) -> None:
        for message in self.messages[self.taken :]:
            self.stream.taken(len(message))
        self.taken = len(self.messages)


class Wire:
    """Bytes in one direction, which arrive in pieces of any size."""

    def __init__(self, random: Random) -> None:
        self.random = random
        self.waiting = bytearray()

    def write(self, data: bytes) -> None:
        self.waiting += data

    def whole(self) -> bytes:
        data = bytes(self.waiting)
        self.waiting.clear()
        return data

    def piece(self) -> bytes:
        most = self.random.choice((1, 9, 100, 20_000, 1 << 20))
        size = self.random.randint(0, min(most, len(self.waiting)))
        data = bytes(self.waiting[:size])
        del self.waiting[:size]
        return data


class Ours:
    """A server's side that echoes requests when the test says so."""

    def __init__(self, wire: Wire, stream_window: int) -> None:
        self.kept: list[Kept] = []
        self.fields: list[Sequence[Field]] = []
        self.connection = Http2Connection(wire.write, self._opened, stream_window=stream_window)
        wire.write(self.connection.opening)

    def _opened(self, stream: Http2Stream, fields: Sequence[Field], end: bool) -> Kept:
        kept = Kept()
        kept.stream = stream
        self.kept.append(kept)
        self.fields.append(fields)
        return kept


def texts(random: Random, sizes: list[int]) -> list[bytes]:
    return [random.randbytes(size) for size in sizes]


@settings(max_examples=MANY)
@given(SEEDS, SIZES, SIZES, st.sampled_from([20_000, 1 << 20]))
def test_both_sides_of_ours_get_what_the_other_sent(seed: int, asked: list[int], answered: list[int], window: int):
    random = Random(seed)
    there, back = Wire(random), Wire(random)
    server = Ours(back, window)
    client = Http2Connection(there.write, stream_window=window)
    there.write(client.opening)
    questions, answers = texts(random, asked), texts(random, answered)
    kept = Kept()
    sending, answering = list(questions), list(answers)
    said = ended = False
    steps = iter(range(STEPS))
    while not (kept.heads and kept.heads[-1][1]):
        next(steps)
        server.connection.receive(there.piece())
        client.receive(back.piece())
        if client.ready and not hasattr(kept, "stream"):
            kept.stream = client.open(HEAD, kept)
        if hasattr(kept, "stream"):
            if sending and not kept.stream.blocked:
                kept.stream.send(sending.pop(0))
            elif not sending and not ended:
                kept.stream.end()
                ended = True
            if random.random() < 0.5:
                kept.take()
        if server.kept:
            theirs = server.kept[0]
            if random.random() < 0.5:
                theirs.take()
            if not said:
                said = True
                server.connection.write(server.connection.headers(theirs.stream.stream_id, ANSWER, end=False))
            if answering and not theirs.stream.blocked:
                theirs.stream.send(answering.pop(0))
            elif not answering and theirs.halves and not theirs.stream.local_closed:
                theirs.stream.end(lambda: server.connection.headers(1, trailers("ABORTED", "so ist's"), end=True))
    theirs = server.kept[0]
    assert parse_request(server.fields[0]) == Http2RequestHead(PATH, None, [("some-bin", b"\0\xff"), ("word", "yes")])
    assert (theirs.messages, kept.messages) == (questions, answers)
    ended_with = parse_trailers(kept.heads[-1][0])
    assert (ended_with.code, ended_with.message) == ("ABORTED", "so ist's")
    assert (theirs.halves, kept.halves, theirs.errors, kept.errors) == (1, 1, [], [])
    assert not client.streams
    assert not server.connection.streams


@settings(max_examples=MANY)
@given(SEEDS, st.sampled_from([20_000, 100_000]), st.integers(1, 60_000))
def test_who_takes_nothing_is_sent_no_more_than_its_window(seed: int, window: int, size: int):
    random = Random(seed)
    there, back = Wire(random), Wire(random)
    server = Ours(back, window)
    client = Http2Connection(there.write)
    there.write(client.opening)
    kept, sent, quiet = Kept(), 0, 0
    steps = iter(range(STEPS))
    while quiet < 50:
        next(steps)
        server.connection.receive(there.piece())
        client.receive(back.piece())
        if client.ready and not hasattr(kept, "stream"):
            kept.stream = client.open(HEAD, kept)
        if hasattr(kept, "stream") and not kept.stream.blocked:
            kept.stream.send(bytes(size))
            sent += size
        quiet = 0 if there.waiting or back.waiting or not server.kept else quiet + 1
    (theirs,) = server.kept
    held = sum(map(len, theirs.messages)) + len(theirs.stream._partial)
    assert held <= window + size, "a window, and what is there of a message that is not whole"
    assert sent <= held + size + 5


def grpc_messages(data: bytes) -> list[bytes]:
    found, at = [], 0
    while at < len(data):
        assert data[at] == 0
        size = int.from_bytes(data[at + 1 : at + 5], "big")
        found.append(data[at + 5 : at + 5 + size])
        at += 5 + size
    assert at == len(data)
    return found


class Library:
    """One side of h2's, which acknowledges data at once or late."""

    def __init__(self, wire: Wire, client: bool) -> None:
        self.connection = H2Connection(H2Configuration(client_side=client, header_encoding=None))
        self.wire = wire
        self.connection.initiate_connection()
        self.data = bytearray()
        self.sending = bytearray()
        self.unacknowledged = 0
        self.heads: list[list[Field]] = []
        self.ended = self.reset = self.settled = False
        self.flush()

    def flush(self) -> None:
        self.wire.write(self.connection.data_to_send())

    def receive(self, data: bytes) -> None:
        for event in self.connection.receive_data(data):
            if isinstance(event, (RequestReceived, ResponseReceived, TrailersReceived)):
                self.heads.append(list(event.headers))
            elif isinstance(event, DataReceived):
                self.data += event.data
                self.unacknowledged += event.flow_controlled_length
            elif isinstance(event, StreamEnded):
                self.ended = True
            elif isinstance(event, StreamReset):
                self.reset = True
            elif isinstance(event, SettingsAcknowledged):
                self.settled = True
        self.flush()

    def pump(self, padding: int | None) -> None:
        """Sends as much data as there is room for, and grants what is due."""
        if self.unacknowledged and not self.ended:
            self.connection.acknowledge_received_data(self.unacknowledged, 1)
            self.unacknowledged = 0
        room = self.connection.local_flow_control_window(1) - (0 if padding is None else padding + 1)
        room = min(room, self.connection.max_outbound_frame_size - 300, len(self.sending))
        if room > 0:
            self.connection.send_data(1, bytes(self.sending[:room]), pad_length=padding)
            del self.sending[:room]
        self.flush()


def framed(messages: list[bytes]) -> bytes:
    return b"".join(b"\0" + len(each).to_bytes(4, "big") + each for each in messages)


@settings(max_examples=MANY)
@given(SEEDS, SIZES, SIZES, st.sampled_from([None, 0, 7, 255]))
def test_our_server_and_a_client_of_h2(seed: int, asked: list[int], answered: list[int], padding: int | None):
    random = Random(seed)
    there, back = Wire(random), Wire(random)
    server, client = Ours(back, 1 << 20), Library(there, client=True)
    questions, answers = texts(random, asked), texts(random, answered)
    client.connection.send_headers(1, HEAD, priority_weight=random.choice((None, 200)))
    client.sending += framed(questions)
    client.flush()
    answering, said, closed = list(answers), False, False
    steps = iter(range(STEPS))
    while not client.ended:
        next(steps)
        server.connection.receive(there.piece())
        client.receive(back.piece())
        if client.ended:
            break
        if not closed:
            client.pump(padding)
            if not client.sending:
                client.connection.end_stream(1)
                client.flush()
                closed = True
        else:
            client.pump(None)
        if server.kept:
            theirs = server.kept[0]
            theirs.take()
            if not said:
                said = True
                server.connection.write(server.connection.headers(1, ANSWER, end=False))
            if answering and not theirs.stream.blocked:
                theirs.stream.send(answering.pop(0))
            elif not answering and theirs.halves and not theirs.stream.local_closed:
                theirs.stream.end(lambda: server.connection.headers(1, trailers("OK"), end=True))
    assert server.kept[0].messages == questions
    assert grpc_messages(bytes(client.data)) == answers
    assert client.heads == [list(ANSWER), trailers("OK")]


@settings(max_examples=MANY)
@given(SEEDS, SIZES, SIZES, st.sampled_from([None, 0, 255]))
def test_our_client_and_a_server_of_h2(seed: int, asked: list[int], answered: list[int], padding: int | None):
    random = Random(seed)
    there, back = Wire(random), Wire(random)
    server = Library(back, client=False)
    client = Http2Connection(there.write)
    there.write(client.opening)
    questions, answers = texts(random, asked), texts(random, answered)
    kept, sending, said, finished = Kept(), list(questions), False, False
    steps = iter(range(STEPS))
    while not kept.halves:
        next(steps)
        server.receive(there.piece())
        client.receive(back.piece())
        if client.ready and not hasattr(kept, "stream"):
            kept.stream = client.open(HEAD, kept)
        if hasattr(kept, "stream"):
            kept.take()
            if sending and not kept.stream.blocked:
                kept.stream.send(sending.pop(0))
            elif not sending and not kept.stream.blocked:
                kept.stream.end()
        if server.heads and not finished:
            if not said:
                said = True
                server.connection.send_headers(1, ANSWER)
                server.sending += framed(answers)
            server.pump(padding)
            if not server.sending and server.ended:
                server.connection.send_headers(1, trailers("NOT_FOUND", "nö"), end_stream=True)
                server.flush()
                finished = True
    assert grpc_messages(bytes(server.data)) == questions
    assert kept.messages == answers
    ended = parse_trailers(kept.heads[-1][0])
    assert (ended.code, ended.message) == ("NOT_FOUND", "nö")
    assert not kept.errors


def recorded(random: Random) -> bytes:
    """Returns what a client sends in a short conversation."""
    wire = Wire(random)
    client = Http2Connection(wire.write)
    wire.write(client.opening)
    for _ in range(random.randint(1, 3)):
        stream = client.open(HEAD, Kept())
        for _ in range(random.randint(0, 4)):
            stream.send(random.randbytes(random.randint(0, 2000)))
        random.choice((stream.end, lambda stream=stream: stream.reset(ErrorCode.CANCEL), client.ping))()
    return bytes(wire.waiting)


@settings(max_examples=usually(95, long=50_000))
@given(SEEDS, st.integers(0, 6))
def test_nonsense_ends_a_connection_or_is_skipped(seed: int, changes: int):
    """A conversation with bytes changed, cut out, doubled and inserted raises nothing else, and keeps little memory."""
    random = Random(seed)
    data = bytearray(recorded(random))
    for _ in range(changes):
        at = random.randrange(len(data))
        to = at + random.randint(1, 20)
        match random.randrange(4):
            case 0:
                data[at] = random.randrange(256)
            case 1:
                del data[at:to]
            case 2:
                data[at:at] = data[at:to]
            case _:
                data[at:at] = random.randbytes(to - at)
        data = data or bytearray(PREFACE)
    wire = Wire(random)
    wire.waiting += data
    answers: list[bytes] = []
    server = Ours(Wire(random), 1 << 20)
    server.connection.write = answers.append
    with suppress(ConnectionFailed):
        while wire.waiting:
            server.connection.receive(wire.piece())
    assert sum(map(len, server.connection._rest)) <= FRAME_BYTES + 9
    assert sum(map(len, answers)) <= 2 * len(data) + 200


@settings(max_examples=usually(70, long=20_000))
@given(st.binary(max_size=400), st.booleans())
def test_any_bytes_after_the_beginning(data: bytes, client: bool):
    connection = Http2Connection(lambda _: None) if client else Ours(Wire(Random(0)), 1 << 20).connection
    beginning = b"" if client else PREFACE
    with suppress(ConnectionFailed):
        connection.receive(beginning + settings_frame({}) + data)


ATTACKS = {
    "pings": frame(6, 0, 0, b"12345678"),
    "empty data": frame(0, 0, 1, b""),
    "settings": frame(4, 0, 0, b""),
    "unknown": frame(0xEE, 0, 0, b""),
    "priorities": frame(2, 0, 1, b"\0\0\0\0\1"),
    "window updates": frame(8, 0, 0, b"\0\0\0\1"),
    "resets": frame(3, 0, 1, b"\0\0\0\1"),
}


@pytest.mark.parametrize("name", ATTACKS)
def test_frames_that_carry_nothing_are_not_read_for_ever(name: str):
    server = Ours(Wire(Random(0)), 1 << 20)
    server.connection.receive(PREFACE + settings_frame({}))
    client_wire = Wire(Random(0))
    client = Http2Connection(client_wire.write)
    client.open(HEAD, Kept())
    server.connection.receive(bytes(client_wire.waiting))
    with pytest.raises(ConnectionFailed) as failed:
        server.connection.receive(ATTACKS[name] * (WORK_UNITS + 1))
    assert failed.value.code is ErrorCode.ENHANCE_YOUR_CALM


def served_until_cut(unit: Callable[[int], bytes], first: bytes = b"", most: int = WORK_UNITS) -> tuple[ErrorCode, int]:
    """Returns the code with which a server ends a connection of repeated ``unit``, and how many it took before."""
    server = Ours(Wire(Random(0)), 1 << 20)
    server.connection.receive(PREFACE + settings_frame({}) + first)
    for taken in range(most):
        try:
            server.connection.receive(unit(taken))
        except ConnectionFailed as failed:
            return failed.code, taken
    raise AssertionError("it was never cut")


def test_messages_do_not_pay_for_frames_that_carry_nothing():
    head = frame(1, 4, 1, Encoder().encode(HEAD))
    code, taken = served_until_cut(lambda _: frame(0, 0, 1, bytes(5)) + ATTACKS["pings"] * 100, head)
    assert code is ErrorCode.ENHANCE_YOUR_CALM
    assert taken * 100 <= WORK_UNITS


def test_a_message_that_comes_byte_by_byte_is_budgeted():
    head = frame(1, 4, 1, Encoder().encode(HEAD)) + frame(0, 0, 1, b"\0\0\x20\0\0")
    code, taken = served_until_cut(lambda _: frame(0, 0, 1, b"x") * 100, head)
    assert code is ErrorCode.ENHANCE_YOUR_CALM
    assert taken * 100 <= WORK_UNITS


@pytest.mark.parametrize(
    ("block", "most"),
    [
        pytest.param(b"\x82" * 385, WORK_UNITS // 385, id="fields of a table"),
        pytest.param(b"\0\1a\0" * 400, WORK_UNITS // 400, id="literals"),
        pytest.param(Encoder().encode([(b"a", b"a" * 12_000)], huffman=True), 16, id="a long value"),
    ],
)
def test_header_blocks_are_budgeted_by_their_fields_and_size(block: bytes, most: int):
    """The budget holds for blocks that open streams and for answers on an open stream."""
    code, taken = served_until_cut(lambda number: frame(1, 4, 2 * number + 1, block))
    assert code is ErrorCode.ENHANCE_YOUR_CALM
    assert taken <= most
    client = Http2Connection(lambda _: None)
    client.receive(settings_frame({}))
    client.open(HEAD, Kept())
    with pytest.raises(ConnectionFailed) as failed:
        client.receive(frame(1, 4, 1, block) * (most + 1))
    assert failed.value.code is ErrorCode.ENHANCE_YOUR_CALM


@pytest.mark.parametrize("name", ["settings", "window updates"])
def test_what_concerns_all_streams_is_budgeted_by_their_number(name: str):
    """The peer grants one byte at a time, and each stream waits for some."""
    wire = Wire(Random(0))
    server = Ours(wire, 1 << 20)
    of_streams = name == "settings"
    server.connection.receive(PREFACE + settings_frame({4: 0 if of_streams else 1 << 20}))
    encoder = Encoder()
    for number in range(STREAMS_MAX):
        server.connection.receive(frame(1, 4, 2 * number + 1, encoder.encode(HEAD)))
        server.kept[-1].stream.send(bytes(100_000))
    server.connection.tick()
    with pytest.raises(ConnectionFailed) as failed:  # noqa: PT012
        for room in range(WORK_UNITS // STREAMS_MAX + 1):
            update = settings_frame({4: room + 1}) if of_streams else ATTACKS[name]
            server.connection.receive(update)
    assert failed.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_a_table_is_not_resized_again_and_again():
    code, taken = served_until_cut(lambda _: frame(1, 4, 1, b"\x20\x3f\xe1\x1f\x20\x82"))
    assert (code, taken) == (ErrorCode.COMPRESSION_ERROR, 0)
    server = Ours(Wire(Random(0)), 1 << 20)
    server.connection.receive(PREFACE + settings_frame({}) + frame(1, 4, 1, b"\x20\x3f\xe1\x1f\x82"))
    assert server.fields == [[(b":method", b"GET")]]


def test_heads_on_a_stream_that_is_over_end_the_connection():
    head = frame(1, 4, 1, Encoder().encode(HEAD)) + frame(3, 0, 1, ErrorCode.CANCEL.to_bytes(4, "big"))
    code, taken = served_until_cut(lambda _: frame(1, 5, 1, b"\x82" * 385), head)
    assert (code, taken) == (ErrorCode.STREAM_CLOSED, 0)


@pytest.mark.parametrize("ticks", [1, 2, 50])
def test_ticks_give_the_work_of_one_period(ticks: int):
    server = Ours(Wire(Random(0)), 1 << 20)
    server.connection.receive(PREFACE + settings_frame({}))
    unknown = ATTACKS["unknown"]
    for _ in range(3):
        for _ in range(ticks):
            server.connection.tick()
        server.connection.receive(unknown * (WORK_UNITS - 10))
    with pytest.raises(ConnectionFailed):
        server.connection.receive(unknown * 20)


@pytest.mark.parametrize("message", [b"", bytes(5)])
def test_calls_that_are_reset_are_not_served_for_ever(message: bytes):
    """CVE-2023-44487, also with a message on each stream."""
    encoder = Encoder()

    def call(number: int) -> bytes:
        stream = 2 * number + 1
        said = frame(0, 0, stream, message) if message else b""
        return (
            frame(1, 4, stream, encoder.encode(HEAD)) + said + frame(3, 0, stream, ErrorCode.CANCEL.to_bytes(4, "big"))
        )

    code, taken = served_until_cut(call)
    assert code is ErrorCode.ENHANCE_YOUR_CALM
    assert taken < 200


def test_a_peer_whose_calls_are_served_may_make_all_of_them():
    """Calls within one tick: as many streams as a connection has in its life, as many at once as are allowed."""
    back, there = Wire(Random(0)), Wire(Random(0))
    server, client = Ours(back, 1 << 20), Http2Connection(there.write)
    server.connection.receive(client.opening)
    calls = 10_048
    for begun in range(0, calls, STREAMS_MAX):
        for _ in range(min(STREAMS_MAX, calls - begun)):
            kept = Kept()
            kept.stream = client.open(HEAD, kept)
            kept.stream.send(bytes(300))
            kept.stream.end()
        server.connection.receive(there.whole())
        for theirs in server.kept[begun:]:
            theirs.take()
            number = theirs.stream.stream_id
            server.connection.write(server.connection.headers(number, ANSWER, end=False))
            theirs.stream.send(bytes(300))
            theirs.stream.end(lambda number=number: server.connection.headers(number, trailers("OK"), end=True))
            server.connection.served()
        client.receive(back.whole())
    assert len(server.kept) == calls
    assert all(len(each.messages) == each.halves == 1 for each in server.kept)
    assert not client.streams


def test_a_served_call_gives_back_only_what_a_common_one_costs():
    server = Ours(Wire(Random(0)), 1 << 20)
    server.connection.receive(PREFACE + settings_frame({}))
    server.connection.receive(ATTACKS["unknown"] * (WORK_UNITS - 10))
    server.connection.served()
    with pytest.raises(ConnectionFailed) as failed:
        server.connection.receive(ATTACKS["unknown"] * 100)
    assert failed.value.code is ErrorCode.ENHANCE_YOUR_CALM


def test_a_peer_with_many_messages_on_few_streams_is_never_cut():
    """The streams carry 100,000 messages each way within one tick, with reads and new grants."""
    back, there = Wire(Random(0)), Wire(Random(0))
    server, client = Ours(back, 1 << 20), Http2Connection(there.write)
    server.connection.receive(client.opening)
    client.receive(back.whole())
    asking = [Kept() for _ in range(4)]
    for each in asking:
        each.stream = client.open(HEAD, each)
    server.connection.receive(there.whole())
    for _ in range(250):
        for each in asking:
            for _ in range(100):
                each.stream.send(bytes(200))
        server.connection.receive(there.whole())
        for theirs in server.kept:
            for _ in theirs.messages[theirs.taken :]:
                theirs.stream.send(bytes(200))
            theirs.take()
        client.receive(back.whole())
        for each in asking:
            each.take()
    assert [each.taken for each in (*asking, *server.kept)] == [25_000] * 8


@pytest.mark.parametrize("last", [False, True])
def test_header_blocks_are_bounded(last: bool):
    """The size is bounded on the wire (CVE-2024-27316) and decoded (a table's entry, named many times)."""
    server = Ours(Wire(Random(0)), 1 << 20)
    server.connection.receive(PREFACE + settings_frame({}))
    with pytest.raises(ConnectionFailed) as failed:  # noqa: PT012
        if last:
            entry = b"\x40\x7f\x80\x01" + b"a" * 255 + b"\x7f\x81\x16" + b"b" * 3000
            server.connection.receive(frame(1, 4, 1, entry + b"\xbe" * 1000))
        else:
            server.connection.receive(frame(1, 0, 1, b"\x82"))
            while True:
                server.connection.receive(frame(9, 0, 1, b"\x82" * 1000))
    assert failed.value.code in (ErrorCode.ENHANCE_YOUR_CALM, ErrorCode.COMPRESSION_ERROR)


def test_more_send_room_is_used_once_settings_are_acknowledged():
    """grpcio holds a sender to the old room before that, and resets the stream."""
    wire = Wire(Random(0))
    client = Http2Connection(wire.write)
    client.receive(settings_frame({4: 10}))
    stream = client.open(HEAD, Kept())
    stream.send(bytes(100))
    wire.waiting.clear()
    client.receive(settings_frame({4: 1000}))
    assert wire.waiting.startswith(frame(4, 1, 0, b""))
    assert len(wire.waiting) > 100


def test_streams_over_the_limit_are_refused_and_others_go_on():
    back = Wire(Random(0))
    server = Ours(back, 1 << 20)
    there = Wire(Random(0))
    client = Http2Connection(there.write)
    server.connection.receive(client.opening)
    client.receive(bytes(back.waiting))
    kept = [Kept() for _ in range(64)]
    for each in kept:
        each.stream = client.open(HEAD, each)
    with pytest.raises(StreamFailed):
        client.open(HEAD, Kept())
    client.peer_streams_max = 1000  # a client that ignores the limit
    late = Kept()
    late.stream = client.open(HEAD, late)
    server.connection.receive(bytes(there.waiting))
    back.waiting.clear()
    kept[5].stream.send(b"on it goes")
    there.waiting.clear()
    assert len(server.kept) == 64


def test_compressed_and_oversized_messages_are_refused_by_name():
    for data, status in ((b"\1\0\0\0\1x", "UNIMPLEMENTED"), (b"\0\xff\0\0\0", "RESOURCE_EXHAUSTED")):
        server = Ours(Wire(Random(0)), 1 << 20)
        wire = Wire(Random(0))
        client = Http2Connection(wire.write)
        stream = client.open(HEAD, Kept())
        server.connection.receive(client.opening + bytes(wire.waiting) + frame(0, 0, stream.stream_id, data))
        (kept,) = server.kept
        assert [each.status for each in kept.errors] == [status]


def test_a_farewell_says_what_was_done_and_why():
    """RFC 9113, 6.8: streams above its number may be tried again elsewhere; h2 reads it the same way."""
    back, there = Wire(Random(0)), Wire(Random(0))
    server, client = Ours(back, 1 << 20), Http2Connection(there.write)
    done, late = Kept(), Kept()
    done.stream = client.open(HEAD, done)
    server.connection.receive(client.opening + bytes(there.waiting))
    late.stream = client.open(HEAD, late)
    with pytest.raises(ConnectionFailed) as failed:
        server.connection.receive(frame(5, 4, 1, b"push"))
    server.connection.leave(failed.value.code, failed.value.reason)

    peer = H2Connection(H2Configuration(client_side=True))
    peer.initiate_connection()
    (said,) = [each for each in peer.receive_data(bytes(back.waiting)) if isinstance(each, ConnectionTerminated)]
    assert (said.last_stream_id, said.error_code, said.additional_data) == (1, ErrorCode.PROTOCOL_ERROR, b"push is off")

    client.receive(bytes(back.waiting))
    assert not done.errors
    assert [(each.status, each.reason) for each in late.errors] == [
        ("UNAVAILABLE", "the peer is leaving (PROTOCOL_ERROR: push is off)")
    ]
    client.lost("the connection broke")
    assert "push is off" in done.errors[0].reason


@pytest.mark.parametrize("words", [b"\x1b[2J", b"\xff\xfe", b"x" * 60_000])
def test_a_farewell_is_bounded_and_printable(words: bytes):
    client, late = Http2Connection(lambda _: None), Kept()
    client.receive(settings_frame({}))
    late.stream = client.open(HEAD, late)
    client.receive(frame(7, 0, 0, bytes(7) + b"\x0b" + words))
    assert late.errors[0].reason.isprintable()
    assert "ENHANCE_YOUR_CALM" in late.errors[0].reason
    assert len(late.errors[0].reason) < 300


@pytest.mark.parametrize("stream_id", [0, 1])
def test_a_window_update_of_nothing_is_an_error_of_the_protocol(stream_id: int):
    """RFC 9113, 6.9: of the stream, or of the connection."""
    back = Wire(Random(0))
    server, there = Ours(back, 1 << 20), Wire(Random(0))
    client = Http2Connection(there.write)
    client.open(HEAD, Kept())
    server.connection.receive(client.opening + bytes(there.waiting))
    back.waiting.clear()
    update = frame(8, 0, stream_id, bytes(4))
    if stream_id:
        server.connection.receive(update)
        assert back.waiting.endswith(frame(3, 0, 1, ErrorCode.PROTOCOL_ERROR.to_bytes(4, "big")))
    else:
        with pytest.raises(ConnectionFailed) as failed:
            server.connection.receive(update)
        assert failed.value.code is ErrorCode.PROTOCOL_ERROR


@pytest.mark.parametrize("stream_id", [0, 1, 3])
def test_a_header_block_nobody_began_is_a_protocol_error(stream_id: int):
    there = Wire(Random(0))
    server, client = Ours(Wire(Random(0)), 1 << 20), Http2Connection(there.write)
    client.open(HEAD, Kept())
    server.connection.receive(client.opening + bytes(there.waiting))
    with pytest.raises(ConnectionFailed) as failed:
        server.connection.receive(frame(9, 4, stream_id, b"x"))
    assert failed.value.code is ErrorCode.PROTOCOL_ERROR


def test_unfinished_messages_of_a_connection_are_bounded():
    """Each stream alone keeps the rules. A connection beyond the limit ends, and its memory is freed."""
    back = Wire(Random(0))
    server, encoder = Ours(back, 1 << 20), Encoder()
    server.connection.receive(PREFACE + settings_frame({}))
    part, parts = bytes(FRAME_BYTES), (4 << 20) // FRAME_BYTES
    begin = (0).to_bytes(1, "big") + (4 << 20).to_bytes(4, "big")
    for number in range(6):
        stream = 2 * number + 1
        server.connection.receive(frame(1, 4, stream, encoder.encode(HEAD)) + frame(0, 0, stream, begin))
        for _ in range(parts - 1):
            if not server.kept[number].errors:
                server.connection.receive(frame(0, 0, stream, part))
        assert server.connection.unfinished <= 16 << 20
    assert [bool(each.errors) for each in server.kept] == [False] * 4 + [True] * 2
    server.connection.receive(frame(0, 0, 1, part))
    assert [len(message) for message in server.kept[0].messages] == [4 << 20]
    server.connection.receive(frame(3, 0, 3, ErrorCode.CANCEL.to_bytes(4, "big")))
    assert server.connection.unfinished < 9 << 20
