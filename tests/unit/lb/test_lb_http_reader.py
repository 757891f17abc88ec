"""Tests of how bytes are read: heads, bodies, refusals, and how much is held before a refusal."""

from __future__ import annotations

import pytest

from pinyon.http.answer import HttpError
from pinyon.http.budget import HttpLimits
from pinyon.http.reader import TURN_BYTES, RequestReader

LIMITS = HttpLimits(line_bytes=200, head_bytes=1000, head_fields=10, body_bytes=5000)
POST = b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\n"
CHUNKED = POST + b"Transfer-Encoding: chunked\r\n\r\n"


def read(data: bytes, step: int = 1 << 20, limits: HttpLimits = LIMITS):
    """Returns all requests in ``data`` as (method, path, body), read ``step`` bytes at a time, and the refusal."""
    reader, found, head = RequestReader(limits), [], None
    try:
        for start in range(0, len(data), step):
            reader.receive(data[start : start + step])
            while True:
                if head is None:
                    head = reader.head()
                    if head is None:
                        break
                if not reader.body():
                    if reader.turn_over:
                        continue
                    break
                found.append((head.method, head.path, bytes(reader.take_body())))
                head = None
    except HttpError as error:
        return found, error.status
    return found, None


def refusal(data: bytes, limits: HttpLimits = LIMITS) -> int | None:
    """Returns the refusal's status, which is the same however the bytes come."""
    statuses = {read(data, step, limits)[1] for step in (1, 7, 1 << 20)}
    assert len(statuses) == 1, statuses
    return statuses.pop()


@pytest.mark.parametrize("step", [1, 3, 64, 1 << 20])
def test_requests_are_read_one_by_one(step):
    data = (
        b"\r\nGET /a?b=c HTTP/1.1\r\nhost: x\r\n\r\n"
        + POST
        + b"Content-Length: 5\r\n\r\nhello"
        + CHUNKED
        + b"2;x=y\r\nab\r\n3\r\ncde\r\n0\r\nx-trailer: 1\r\n\r\n"
        + b"HEAD http://lb/h%20i HTTP/1.1\r\nhost: x\r\n\r\n"
    )
    assert read(data, step) == (
        [
            ("GET", "/a", b""),
            ("POST", "/v1/completions", b"hello"),
            ("POST", "/v1/completions", b"abcde"),
            ("HEAD", "/h i", b""),
        ],
        None,
    )


@pytest.mark.parametrize(
    ("data", "status"),
    [
        (b"GET /" + b"a" * 300 + b" HTTP/1.1\r\nhost: x\r\n\r\n", 414),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 2000, 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\nx: " + b"a" * 2000 + b"\r\n\r\n", 431),
        (b"GET / HTTP/1.1\r\nhost: x\r\n" + b"a: b\r\n" * 10 + b"\r\n", 431),
        (CHUNKED + b"0\r\n" + b"x: y\r\n" * 2000, 431),
        (CHUNKED + b"0\r\nx: " + b"y" * 9000, 431),
        (CHUNKED + b"1389\r\n", 413),
        (CHUNKED + b"1000\r\n" + b"a" * 4096 + b"\r\n1000\r\n", 413),
        (CHUNKED + b"1;" + b"x" * 300, 400),
        (CHUNKED + b"1;xxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxxx\r\na\r\n" * 600, 400),
        (POST + b"Content-Type: multipart/form-data\r\nContent-type: application/json\r\n\r\n", 400),
        (b"GET / HTTP/2.0\r\nhost: x\r\n\r\n", 505),
        (b"GET / HTTP/0.9\r\nhost: x\r\n\r\n", 505),
        (b"GET /\r\n\r\n", 400),
        (b"PRI * HTTP/2.0\r\n\r\nSM\r\n\r\n", 505),
        (b"\x16\x03\x01\x02\x00\x01\x00\x01", 400),
        (b"get / HTTP/1.1\r\nhost: x\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\n\r\n", 400),
        (b"GET / HTTP/1.1\r\nhost: x\r\nhost: x\r\n\r\n", 400),
    ],
)
def test_what_is_refused(data, status):
    assert refusal(data) == status


@pytest.mark.parametrize(
    "fields",
    [
        b"Content-Length: 3\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nContent-Length: 3\r\n",
        b"Content-Length: 3\r\nContent-Length: 3\r\n",
        b"Content-Length: 3\r\nContent-Length: 4\r\n",
        b"Content-Length: 3, 3\r\n",
        b"Content-Length: +3\r\n",
        b"Content-Length: 0x3\r\n",
        b"Content-Length: 1_0\r\n",
        b"Content-Length: -1\r\n",
        b"Content-Length:\r\n",
        b"Content-Length: 99999999999999999999\r\n",
        b"Transfer-Encoding: identity\r\n",
        b"Transfer-Encoding: xchunked\r\n",
        b"Transfer-Encoding: chunked, identity\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: chunked\r\n",
        b"Transfer-Encoding: chunked\r\nTransfer-Encoding: identity\r\n",
        b"Transfer-Encoding: \x0bchunked\r\n",
        b"Transfer-Encoding : chunked\r\n",
        b"X: a\r\n b\r\n",
        b" X: a\r\n",
        b"X: a\0b\r\n",
        b"X: a\rb\r\n",
        b"X: a\nY: b\r\n",
        b"Content-Length: 3\n",
        b": a\r\n",
        b"X(: a\r\n",
        b"no colon\r\n",
    ],
)
def test_framing_that_two_could_read_differently_is_refused(fields):
    assert refusal(POST + fields + b"\r\nabc") in (400, 413)
    assert not read(POST + fields + b"\r\nabc")[0]


def test_codings_that_nobody_here_understands_are_refused():
    assert refusal(POST + b"Transfer-Encoding: gzip, chunked\r\n\r\n") == 501


@pytest.mark.parametrize(
    "body",
    [
        b"2\nab\n0\n\n",
        b"2\r\nab\n0\r\n\r\n",
        b"2\r\nabc\r\n0\r\n\r\n",
        b" 2\r\nab\r\n0\r\n\r\n",
        b"2 \r\nab\r\n0\r\n\r\n",
        b"+2\r\nab\r\n0\r\n\r\n",
        b"0x2\r\nab\r\n0\r\n\r\n",
        b"-1\r\nab\r\n0\r\n\r\n",
        b"\r\nab\r\n0\r\n\r\n",
        b"2;a\0\r\nab\r\n0\r\n\r\n",
        b"2;a\nb\r\nab\r\n0\r\n\r\n",
        b"ffffffffffffffffffff\r\n",
        b"0\r\n folded: x\r\n\r\n",
        b"0\r\nno colon\r\n\r\n",
        b"0\r\nx: \0\r\n\r\n",
    ],
)
def test_chunks_that_two_could_read_differently_are_refused(body):
    found, status = read(CHUNKED + body)
    assert (found, status) == ([], 400)


def test_a_trailer_is_no_header():
    reader = RequestReader(LIMITS)
    reader.receive(CHUNKED + b"0\r\nAuthorization: Bearer x\r\nx-pinyon-user: eve\r\n\r\n")
    head = reader.head()
    assert reader.body()
    assert [name for name, _ in head.fields] == [b"host", b"transfer-encoding"]


def test_an_upgrade_that_nobody_takes_up_changes_nothing():
    smuggled = b"GET /admin HTTP/1.1\r\nhost: x\r\n\r\n"
    head = b"POST /a HTTP/1.1\r\nhost: x\r\nConnection: upgrade\r\nUpgrade: h2c\r\ncontent-length: %d\r\n\r\n"
    assert read(head % len(smuggled) + smuggled) == ([("POST", "/a", smuggled)], None)


def test_what_is_held_of_an_unfinished_request_is_bounded():
    flood = b"x" * 1000
    for begin, status in [(POST + b"x: ", 431), (b"GET /", 414), (CHUNKED + b"0\r\nx: ", 431), (CHUNKED + b"1;", 400)]:
        reader = RequestReader(LIMITS)
        reader.receive(begin)
        assert refused_in(reader, flood, held_max=12_000) == status


def refused_in(reader: RequestReader, flood: bytes, held_max: int) -> int | None:
    began = False
    try:
        for _ in range(100):
            began = began or reader.head() is not None
            if began:
                assert not reader.body()
            assert reader.held < held_max
            reader.receive(flood)
    except HttpError as error:
        return error.status
    return None


def test_a_refused_body_is_not_kept():
    reader = RequestReader(LIMITS)
    reader.receive(POST + b"content-length: 4000\r\n\r\n")
    assert reader.head() is not None
    reader.discard()
    for _ in range(40):
        assert not reader.body()
        reader.receive(b"x" * 100)
        assert reader.held <= 100
    assert reader.body()
    assert reader.take_body() == b""


def test_pipelined_requests_stay_bytes():
    """The reader parses only one head, however many requests come at once."""
    reader = RequestReader(LIMITS)
    many = b"GET / HTTP/1.1\r\nhost: x\r\n\r\n" * 1000
    reader.receive(many)
    assert reader.head() is not None
    assert reader.unread == len(many) // 1000 * 999


def test_a_body_of_tiny_chunks_is_read_in_turns():
    limits = HttpLimits(body_bytes=1 << 20)
    data = CHUNKED + b"1\r\na\r\n" * 50_000 + b"0\r\n\r\n"
    reader = RequestReader(limits)
    reader.receive(data)
    assert reader.head() is not None
    turns = 1
    while not reader.body():
        assert reader.turn_over
        turns += 1
    assert turns >= len(data) // TURN_BYTES
    assert bytes(reader.take_body()) == b"a" * 50_000
