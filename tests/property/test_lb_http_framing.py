"""Requests as bytes: the reader accepts only what h11 and llhttp accept, and reads it the same way."""

from __future__ import annotations

import re

import h11
import httptools
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from pinyon.http.answer import HttpError
from pinyon.http.budget import HttpLimits
from pinyon.http.peers import BLOCK_MAX, PeerPlaces, TrustedProxies, read_proxy_line
from pinyon.http.reader import RequestReader
from tests.long import usually

LIMITS = HttpLimits()
TOKEN = "!#$%&'*+-.^_`|~0123456789abcdefghijklmnopqrstuvwxyzABCDEFGHIJKLMNOPQRSTUVWXYZ"

names = st.text(TOKEN, min_size=1, max_size=12).map(str.encode)
field_values = st.text(st.characters(min_codepoint=33, max_codepoint=126), max_size=20).map(str.encode)
RESERVED = {b"host", b"content-length", b"transfer-encoding", b"connection", b"upgrade", b"expect"}


@st.composite
def requests(draw):
    """Returns ``(bytes, method, target, body)`` of one valid request."""
    method = draw(st.sampled_from([b"GET", b"POST", b"PUT", b"DELETE", b"OPTIONS", b"HEAD", b"PATCH"]))
    target = b"/" + draw(st.text("abc/._-~?=&;,+@", max_size=20)).encode()
    fields = [
        (name, value)
        for name, value in draw(st.lists(st.tuples(names, field_values), max_size=5))
        if name.lower() not in RESERVED
    ]
    fields.insert(draw(st.integers(0, len(fields))), (b"Host", b"lb"))
    body = draw(st.binary(max_size=200))
    raw = b""
    if draw(st.booleans()):
        fields.append((b"Transfer-Encoding", b"chunked"))
        rest = body
        while rest:
            size = draw(st.integers(1, len(rest)))
            extension = draw(st.sampled_from([b"", b";a", b';a="b c"']))
            raw += b"%x%b\r\n%b\r\n" % (size, extension, rest[:size])
            rest = rest[size:]
        raw += b"0\r\n" + draw(st.sampled_from([b"", b"x-sum: 1\r\n"])) + b"\r\n"
    elif body or draw(st.booleans()):
        fields.append((b"Content-Length", b"%d" % len(body)))
        raw = body
    head = b"%b %b HTTP/1.1\r\n" % (method, target) + b"".join(b"%b: %b\r\n" % field for field in fields) + b"\r\n"
    return head + raw, method, target, body


def ours(data: bytes, steps: list[int]):
    """Returns requests read as ``(method, target, body)``, and whether reading ended with a refusal."""
    reader, found, head, start = RequestReader(LIMITS), [], None, 0
    try:
        for step in [*steps, len(data)]:
            reader.receive(data[start : start + step])
            start += step
            while True:
                if head is None and (head := reader.head()) is None:
                    break
                if not reader.body():
                    break
                found.append((head.method.encode(), head.target, bytes(reader.take_body())))
                head = None
    except HttpError as error:
        return found, error.status in (400, 414, 431, 413, 501, 505)
    return found, False


def of_h11(data: bytes):
    connection, found, current = h11.Connection(h11.SERVER, max_incomplete_event_size=1 << 20), [], None
    connection.receive_data(data)
    try:
        while True:
            event = connection.next_event()
            if event is h11.NEED_DATA or event is h11.PAUSED:
                if current is None and event is h11.PAUSED:
                    connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                    connection.send(h11.EndOfMessage())
                    if connection.our_state is h11.MUST_CLOSE:
                        return found, False
                    connection.start_next_cycle()
                    continue
                return found, False
            if isinstance(event, h11.Request):
                current = [event.method, event.target, b""]
            elif isinstance(event, h11.Data):
                current[2] += bytes(event.data)
            elif isinstance(event, h11.EndOfMessage):
                found.append(tuple(current))
                current = None
                connection.send(h11.Response(status_code=200, headers=[("content-length", "0")]))
                connection.send(h11.EndOfMessage())
                if connection.our_state is not h11.DONE:
                    return found, False
                connection.start_next_cycle()
            else:
                return found, False
    except h11.RemoteProtocolError:
        return found, True


class Llhttp:
    def __init__(self) -> None:
        self.found, self.target, self.body = [], b"", b""
        self.parser = httptools.HttpRequestParser(self)

    def on_message_begin(self):
        self.target, self.body = b"", b""

    def on_url(self, url):
        self.target += url

    def on_body(self, body):
        self.body += body

    def on_message_complete(self):
        self.found.append((self.parser.get_method(), self.target, self.body))


def of_llhttp(data: bytes):
    reader = Llhttp()
    try:
        reader.parser.feed_data(data)
    except httptools.HttpParserError:
        return reader.found, True
    except httptools.HttpParserUpgrade:
        return reader.found, False
    return reader.found, False


@settings(max_examples=usually(25, long=300), deadline=None)
@given(st.lists(requests(), min_size=1, max_size=3), st.lists(st.integers(1, 40), max_size=12))
def test_good_requests_are_read_as_others_read_them(messages, steps):
    data = b"".join(raw for raw, *_ in messages)
    expected = [(method, target, body) for _, method, target, body in messages]
    assert ours(data, steps) == (expected, False)
    assert of_h11(data) == (expected, False)
    assert of_llhttp(data) == (expected, False)


@settings(max_examples=usually(45, long=1000), deadline=None)
@given(requests(), st.data())
def test_broken_requests_are_not_read_otherwise_than_others_do(message, data):
    """The test changes, drops or adds one or two bytes; if the reader accepts the result, so do both oracles."""
    raw = bytearray(message[0])
    for _ in range(data.draw(st.integers(1, 2))):
        position = data.draw(st.integers(0, len(raw) - 1))
        byte = data.draw(st.sampled_from(list(b"\r\n\0 \t:;,0123456789abcdefxA/\x7f\x80\xff")))
        kind = data.draw(st.sampled_from(["change", "drop", "add"]))
        if kind == "change":
            raw[position] = byte
        elif kind == "drop":
            del raw[position]
        else:
            raw.insert(position, byte)
        if not raw:
            raw += b"\r\n"
    read_alike(bytes(raw), data.draw(st.lists(st.integers(1, 40), max_size=6)))


@pytest.mark.parametrize("lines", [1, 2])
def test_empty_lines_before_a_request_are_no_part_of_it(lines):
    raw = b"\r\n" * lines + b"GET /b HTTP/1.1\r\nHost: lb\r\n\r\n"
    assert ours(raw, []) == ([(b"GET", b"/b", b"")], False)
    read_alike(raw, [])


def read_alike(raw: bytes, steps: list[int]) -> None:
    found, _ = ours(raw, steps)
    if found:
        # h11 refuses the empty lines before a request that a server should ignore (RFC 9112, section 2.2).
        assert of_h11(re.sub(rb"\A(?:\r\n)+", b"", raw))[0][:1] == found[:1], raw
        assert of_llhttp(raw)[0][:1] == found[:1], raw


@settings(max_examples=usually(25, long=300), deadline=None)
@given(st.binary(max_size=300), st.lists(st.integers(1, 40), max_size=12))
def test_any_bytes_are_read_or_refused_however_they_come(data, steps):
    assert ours(data, steps) == ours(data, [])


@settings(max_examples=usually(25, long=300), deadline=None)
@given(st.binary(max_size=100) | st.binary(max_size=60).map(lambda raw: b"PROXY " + raw)
       | st.binary(max_size=60).map(lambda raw: b"\r\n\r\n\0\r\nQUIT\n" + raw))  # fmt: skip
def test_any_bytes_are_a_proxy_header_or_refused(data):
    try:
        line = read_proxy_line(data)
    except HttpError:
        return
    if line is None:
        assert len(data) < BLOCK_MAX
    else:
        assert line[1] <= len(data)


@settings(max_examples=usually(25, long=300), deadline=None)
@given(st.lists(st.tuples(st.sampled_from([b"x-forwarded-for", b"forwarded"]), st.binary(max_size=60)), max_size=4))
def test_any_forwarded_header_names_an_address_that_counts(fields):
    for name in ("x-forwarded-for", "forwarded"):
        client = TrustedProxies("10.0.0.0/8", name).client("10.0.0.1", fields)
        assert PeerPlaces(1).take(client) is not None
