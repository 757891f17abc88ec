"""Parts of the load balancer before foreign servers: URLs, keys, fields, bodies, settings, connections."""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
import time

import pytest
from hypothesis import given
from hypothesis import strategies as st

from pinyon.core.errors import InvalidArgument
from pinyon.core.request import Usage
from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import Absent, Broke, ConnectionsFull
from pinyon.frontdoor.upstreams.connection import ConnectionLimits, UpstreamConnection
from pinyon.frontdoor.upstreams.fields import from_server, to_server
from pinyon.frontdoor.upstreams.passing import Passing, read_usage
from pinyon.frontdoor.upstreams.pool import ConnectionPool
from pinyon.frontdoor.upstreams.reading import read_asked
from pinyon.frontdoor.upstreams.url import UpstreamUrl, parse_upstreams, read_upstream_keys
from pinyon.runtime.setting_sources import load_settings
from services.lb.settings import LbSettings
from tests.tcp_server import tcp_server
from tests.tls_files import TestAuthority

WAIT_S = 60.0

# ---------------------------------------------------------------- settings


@pytest.mark.parametrize(
    ("text", "name", "prefix"),
    [
        ("http://a:8000", "http://a:8000", ""),
        ("http://a:8000/", "http://a:8000", ""),
        ("http://a:8000/v1/", "http://a:8000", ""),
        ("http://a", "http://a", ""),
        ("http://a:80/x/v1", "http://a/x", "/x"),
        ("https://A.example:443/api/x", "https://a.example/api/x", "/api/x"),
        ("http://[::1]:8000", "http://[::1]:8000", ""),
    ],
)
def test_urls(text: str, name: str, prefix: str) -> None:
    (url,) = parse_upstreams(text)
    assert str(url) == name
    assert url.prefix == prefix


@pytest.mark.parametrize(
    "text",
    ["", "a:8000", "ftp://a", "http://", "http://u:p@a", "http://a?x=1", "http://a/#", "http://a:0", "http://a:99999",
     "http://a,http://a/v1", "http://a b", "http://a/x y", "http://a,", "http://a/\r\nx", "http://[::1"],
)  # fmt: skip
def test_what_is_no_url(text: str) -> None:
    with pytest.raises(InvalidArgument):
        parse_upstreams(text)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        (["--upstream", "http://a", "--conductor", "a:1"], "--conductor does not go with --upstream"),
        (["--upstream", "http://a", "--model", "/x"], "--model does not go with --upstream"),
        (["--upstream-capacity", "3"], "--upstream-capacity is of use with --upstream only"),
        (["--upstream", "nonsense"], "must begin with http"),
        (["--upstream", "http://a", "--routing", "x"], "no routing policy 'x'"),
        (["--upstream", "http://a", "--pushing", "x"], "no pushing policy"),
        (["--upstream", "http://a", "--upstream-ca-file", "x"], "names none"),
        (["--upstream", "http://u:secret@a"], "--upstream-api-key-file"),
    ],
)
def test_settings_that_contradict_each_other(arguments: list[str], message: str, capsys) -> None:
    with pytest.raises(SystemExit):
        load_settings(LbSettings, arguments, {})
    assert message in capsys.readouterr().err


def test_requests_wait_for_room_at_servers_of_others() -> None:
    assert load_settings(LbSettings, [], {}).pushing_choice == "blind"
    assert load_settings(LbSettings, ["--upstream", "http://a"], {}).pushing_choice == "pending"


def test_keys_of_servers(tmp_path) -> None:
    file = tmp_path / "keys"
    assert read_upstream_keys("").of("http://a", own=True) == ""
    file.write_text("# all\nsk-1\n\nhttp://a/v1 sk-2\n")
    keys = read_upstream_keys(str(file))
    assert keys.of("http://a", own=True) == keys.of("http://a", own=False) == "sk-2"
    assert keys.of("http://b", own=True) == "sk-1"
    assert keys.of("http://b", own=False) == "", "somebody else has named it"
    assert "sk-" not in repr(keys)
    for wrong in ("", "a b c", "sk-1\nsk-2", "no-url sk-1", "http://a x\nhttp://a/ y", "sk-\u00e4", "sk-\x01"):
        file.write_text(wrong)
        with pytest.raises(InvalidArgument) as error:
            read_upstream_keys(str(file))
        assert "sk-" not in error.value.message
    with pytest.raises(InvalidArgument):
        read_upstream_keys(str(tmp_path / "none"))


# ---------------------------------------------------------------- fields and bodies


def test_fields_that_are_for_one_hop_stay_there() -> None:
    sent = [(b"connection", b"close, X-Hop"), (b"x-hop", b"1"), (b"host", b"lb"), (b"x-kept", b"2"), (b"cookie", b"c")]
    assert to_server(sent) == [b"x-kept: 2\r\n", b"cookie: c\r\n"]
    came = [
        (b"content-type", b"text/plain"), (b"connection", b"x-hop"), (b"x-hop", b"1"), (b"set-cookie", b"a"),
        (b"set-cookie", b"b"), (b"x-ratelimit-limit-requests", b"5"), (b"date", b"now"), (b"trailer", b"x"),
    ]  # fmt: skip
    kind, lines = from_server(came, own_rates=False)
    assert kind == b"text/plain"
    assert lines == b"set-cookie: a\r\nset-cookie: b\r\nx-ratelimit-limit-requests: 5\r\n"
    assert b"ratelimit" not in from_server(came, own_rates=True)[1]


@pytest.mark.parametrize(
    "name",
    ["X-Forwarded-User", "X-Forwarded-Prefix", "X-Forwarded-Port", "X-Forwarded-For", "x_forwarded_user", "X-Api-Key",
     "api-key", "x_api_key", "Authorization", "Remote-User", "X-Remote-User", "X-Auth-Request-Email", "X-Original-URL",
     "X-Real-IP", "Forwarded", "CF-Connecting-IP", "X-SSL-Client-Verify", "X-Amzn-Oidc-Identity",
     "X-MS-Client-Principal"],
)  # fmt: skip
def test_clients_do_not_assert_who_they_are_to_servers(name: str) -> None:
    assert to_server([(name.lower().encode(), b"v"), (b"x-kept", b"1")]) == [b"x-kept: 1\r\n"]


def ask(body: bytes, path: str = "/v1/chat/completions"):
    return read_asked(path, b"application/json", body, b"secret", 256)


def test_what_is_read_of_a_body() -> None:
    text = "x" * 1024
    found = ask(b'{"model":"m","stream":true,"max_tokens":10,"priority":-3,"user":"u","messages":[{"role":"user",'
                b'"content":"%b"}]}' % text.encode())  # fmt: skip
    assert (found.model, found.stream, found.user, found.priority) == ("m", True, "u", -3)
    assert len(found.keys) == 8 * 4
    assert found.tokens == found.prompt_tokens + 10
    spaced = ask(b'{ "messages" : [ {"content":"%b", "role":"user"} ], "model": "m" }' % text.encode())
    assert spaced.keys == found.keys
    assert spaced.tokens == spaced.prompt_tokens + 256
    assert ask(b'{"model":"n","messages":[{"role":"user","content":"%b"}]}' % text.encode()).keys != found.keys
    salted = ask(b'{"model":"m","cache_salt":"s","messages":[{"role":"user","content":"%b"}]}' % text.encode())
    assert salted.keys != found.keys
    embedded = ask(b'{"model":"m","input":"%b"}' % text.encode(), "/v1/embeddings")
    assert (embedded.model, embedded.keys) == ("m", b"")


@given(st.binary(max_size=300), st.sampled_from([b"application/json", b"Multipart/form-data; boundary=x", b""]))
def test_any_body_is_read_or_refused(body: bytes, kind: bytes) -> None:
    for raw in (body, b'{"model":' + body + b"}", b'{"model":"m","messages":[' + body + b"]}"):
        with contextlib.suppress(InvalidArgument):
            read_asked("/v1/chat/completions", kind, raw, b"", 1)


def form_model(body: bytes) -> str:
    return read_asked("/v1/audio/transcriptions", b"multipart/form-data; boundary=x", body, b"", 1).model


def test_the_model_of_a_form() -> None:
    part = b'--x\r\nContent-Disposition: form-data; name="%b"\r\n%b\r\n%b\r\n'
    recording = part % (b"file", b"Content-Type: audio/wav\r\n", b"\x00" * 100_000)
    model = part % (b"model", b"", b"m")
    assert form_model(model + recording + b"--x--") == "m"
    assert form_model(recording + model + b"--x--") == "m"
    assert form_model(part % (b"model", b"Content-Type: text/plain\r\nX: y\r\n", b"m")) == "m"
    for unfit in (b"", b"y" * 257, b"a\nb"):
        assert form_model(part % (b"model", b"", unfit)) == ""
        assert form_model(part % (b"model", b"", unfit) + model) == "m"
    assert form_model(recording + b"--x--") == ""
    assert form_model(b'name="model"\r\n\r\nm') == ""


@pytest.mark.parametrize("line", [b'name="model"\r\n', b'name="model"\r\n\r\n', b'name="model"\r\nx: y\r\n', b"\r\n"])
def test_a_hostile_form_is_read_in_linear_time(line: bytes) -> None:
    body = line * (131_072 // len(line))
    began_s = time.thread_time()
    assert form_model(body) in ("", 'name="model"')
    assert time.thread_time() - began_s < 1.0  # this thread's own time is a millisecond; it would otherwise be seconds


@pytest.mark.parametrize(
    ("tail", "used"),
    [
        (b'{"usage":{"prompt_tokens":5,"completion_tokens":2,"prompt_tokens_details":null}}', Usage(5, 2, 0)),
        (b'x"usage": {"prompt_tokens":5,"prompt_tokens_details":{"cached_tokens":9}}', Usage(5, 0, 5)),
        (b'data: {"usage":{"prompt_tokens":5,"completion_tokens":1}}\n\ndata: {"usage":null}\n\n', Usage(5, 1, 0)),
        (b'{"usage":{"input_tokens":5,"output_tokens":3}}', Usage(5, 3, 0)),
        (b'{"usage":{"prompt_tokens":-5}}', None),
        (b'{"usage":{"prompt_tokens":5', None),
        (b'{"usage":[]}', None),
        (b'{"text":"\\"usage\\":{\\"prompt_tokens\\":5}"}', None),
        (b"", None),
    ],
)
def test_usage_at_the_end_of_an_answer(tail: bytes, used: Usage | None) -> None:
    assert read_usage(tail) == used


class Nowhere:
    """The source of an answer that is filled by hand."""

    def pause(self) -> None:
        pass

    def resume(self) -> None:
        pass

    def give_up(self, answer: Answer) -> None:
        pass


class Sent:
    """The client of an answer. ``behind`` says of each piece whether the client has no room for it on arrival."""

    def __init__(self, behind: list[bool]) -> None:
        self.pieces: list[bytes] = []
        self.ended: list[bytes] = []
        self.begun = False
        self._behind = behind

    def whole(self, status: int, body: bytes, content_type: bytes = b"", fields: bytes = b"") -> None:
        self.ended.append(body)

    def begin(self, content_type: bytes, fields: bytes = b"", status: int = 200, length: int = -1) -> None:
        assert not self.pieces
        self.begun = True

    async def send(self, data: bytes) -> None:
        assert data
        await asyncio.sleep(0)
        self.pieces.append(data)

    def push(self, data: bytes) -> bool:
        assert data
        if self._behind and self._behind.pop():
            return False
        self.pieces.append(data)
        return True

    async def end(self, data: bytes) -> None:
        await asyncio.sleep(0)
        self.ended.append(data)


async def pass_on(
    batches: list[list[bytes]], behind: list[bool], pauses: list[bool], breaks: bool, kind: bytes
) -> Sent:
    """Passes on batches whose pieces come at once; between two batches the loop turns, or does not."""
    sent, answer = Sent(behind), Answer(Nowhere())
    answer.begun = True
    answer.got_head(200, [(b"content-type", kind)], -1)
    passing = Passing(answer, sent, b"", lambda: 1.0)
    running = asyncio.ensure_future(passing.run())
    for number, batch in enumerate(batches, 1):
        if pauses and pauses.pop():
            for _ in range(5):
                await asyncio.sleep(0)
        for piece in batch:
            answer.got(piece)
        if number == len(batches) and not breaks:
            answer.got_all()
        answer.arrived()
    if breaks or not batches:
        answer.broke("it broke")
        with pytest.raises(Broke):
            await running
    else:
        await running
        assert len(sent.ended) == 1
    return sent


EVENT_PIECES = st.sampled_from([b"data: x", b"\n", b"\n\n", b"\r\n\r\n", b"\r\n", b"y" * 70_000])
BATCHES = st.lists(st.lists(EVENT_PIECES, min_size=1, max_size=4), max_size=12)


@given(BATCHES, st.lists(st.booleans()), st.lists(st.booleans()), st.booleans())
def test_a_stream_loses_no_byte_and_is_cut_between_events_only(batches, behind, pauses, breaks: bool) -> None:
    came = b"".join(piece for batch in batches for piece in batch)
    sent = asyncio.run(pass_on(batches, behind, pauses, breaks, b"text/event-stream"))
    for piece in sent.pieces:
        assert piece.endswith((b"\n\n", b"\n\r\n")) or len(piece) > 64 << 10
    passed = b"".join([*sent.pieces, *sent.ended])
    if not breaks and batches:
        assert passed == came
        return
    assert came.startswith(passed)
    rest = came[len(passed) :]  # the part of an event whose end has not come
    assert b"\n\n" not in rest[:-1] or len(rest) <= 64 << 10


@given(BATCHES, st.lists(st.booleans()), st.lists(st.booleans()))
def test_what_is_no_stream_loses_no_byte_either(batches, behind, pauses) -> None:
    sent = asyncio.run(pass_on(batches, behind, pauses, False, b"application/json"))
    if batches:
        assert b"".join([*sent.pieces, *sent.ended]) == b"".join(piece for batch in batches for piece in batch)


async def test_a_long_event_in_single_bytes_takes_linear_time() -> None:
    async def seconds(event: bytes) -> float:
        """Returns the seconds to pass on 60,000 bytes of such events, byte by byte."""
        answer, sent = Answer(Nowhere()), Sent([])
        answer.got_head(200, [(b"content-type", b"text/event-stream")], -1)
        running = asyncio.ensure_future(Passing(answer, sent, b"", lambda: 1.0).run())
        await asyncio.sleep(0)
        began_s = time.thread_time()
        for byte in event * (60_000 // len(event)):
            answer.got(bytes((byte,)))
            answer.arrived()
        took_s = time.thread_time() - began_s
        answer.got_all()
        answer.arrived()
        await running
        assert b"".join([*sent.pieces, *sent.ended]) == event * (60_000 // len(event))
        return took_s

    short = min([await seconds(b"x" * 98 + b"\n\n") for _ in range(3)])
    assert await seconds(b"x" * 59_998 + b"\n\n") < 6 * short  # 20 times as much if each byte were a search


async def test_what_goes_wrong_in_passing_on_ends_it() -> None:
    class Wrong(Sent):
        def push(self, data: bytes) -> bool:
            raise KeyError("wrong")

    answer = Answer(Nowhere())
    answer.got_head(200, [(b"content-type", b"text/event-stream")], -1)
    running = asyncio.ensure_future(Passing(answer, Wrong([]), b"", lambda: 1.0).run())
    await asyncio.sleep(0)
    answer.got(b"data: x\n\n")
    answer.arrived()
    with pytest.raises(KeyError):
        await running


# ---------------------------------------------------------------- connections

WHOLE = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n%b\r\n{}"


class Peer:
    """A server that reads heads and writes what it is told; at ``None`` it closes."""

    tls: ssl.SSLContext | None = None

    def __init__(self) -> None:
        self.says: bytes | None = WHOLE % b""
        self.connections = 0
        self.changed = asyncio.Event()
        self._stack = contextlib.AsyncExitStack()

    async def __aenter__(self) -> Peer:
        self.server = await self._stack.enter_async_context(tcp_server(self._serve, self.tls))
        self.url = UpstreamUrl("127.0.0.1", self.server.sockets[0].getsockname()[1], self.tls is not None)
        return self

    async def __aexit__(self, *_) -> None:
        await self._stack.aclose()

    async def _serve(self, reader: asyncio.StreamReader, writer: asyncio.StreamWriter) -> None:
        self.connections += 1
        try:
            while await reader.readuntil(b"\r\n\r\n"):
                if self.says is None:
                    break
                writer.write(self.says)
        finally:
            self.changed.set()


async def whole(pool: ConnectionPool) -> bytes:
    answer = await pool.send(b"GET / HTTP/1.1\r\n\r\n", b"", WAIT_S)
    try:
        body = b""
        while piece := await answer.read():
            body += piece
        return body
    finally:
        answer.close()


async def test_connections_are_reused_until_they_are_idle_too_long() -> None:
    async with Peer() as peer:
        pool = ConnectionPool(peer.url, ConnectionLimits(idle_s=10 * WAIT_S), 4)
        for _ in range(3):
            assert await whole(pool) == b"{}"
        assert peer.connections == 1
        pool.close()
        await asyncio.wait_for(peer.changed.wait(), WAIT_S)
        pool = ConnectionPool(peer.url, ConnectionLimits(idle_s=0.05), 4)
        for connections in (2, 3):
            peer.changed.clear()
            assert await whole(pool) == b"{}"
            await asyncio.wait_for(peer.changed.wait(), WAIT_S)  # it closes by itself
            assert not pool._idle
            assert peer.connections == connections
        pool.close()


@pytest.mark.parametrize("field", [b"connection: close\r\n", b"keep-alive: timeout=1\r\n"])
async def test_connections_the_server_will_close_are_not_reused(field: bytes) -> None:
    async with Peer() as peer:
        peer.says = WHOLE % field
        pool = ConnectionPool(peer.url, ConnectionLimits(), 4)
        for _ in range(3):
            assert await whole(pool) == b"{}"
        assert peer.connections == 3
        pool.close()


async def test_there_are_no_more_connections_than_may_be() -> None:
    async with Peer() as peer:
        peer.says = b"HTTP/1.1 200 OK\r\ncontent-length: 2\r\n\r\n{"
        pool = ConnectionPool(peer.url, ConnectionLimits(), 1)
        answer = await pool.send(b"GET / HTTP/1.1\r\n\r\n", b"", WAIT_S)
        with pytest.raises(ConnectionsFull):
            await whole(pool)
        answer.close()  # the peer is told of it
        async with asyncio.timeout(WAIT_S):
            await peer.changed.wait()
        peer.says = WHOLE % b""
        assert await whole(pool) == b"{}"
        pool.close()


async def test_who_is_not_there_and_who_does_not_answer() -> None:
    async with Peer() as peer:
        peer.says = b""
        pool = ConnectionPool(peer.url, ConnectionLimits(), 4)
        with pytest.raises(Broke, match="in time"):
            await pool.send(b"GET / HTTP/1.1\r\n\r\n", b"", 0.05)
        peer.says = None
        with pytest.raises(Broke) as broke:
            await whole(pool)
        assert not broke.value.begun
        pool.close()
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))  # and does not listen
        with pytest.raises(Absent):
            await whole(ConnectionPool(UpstreamUrl("127.0.0.1", deaf.getsockname()[1], False), ConnectionLimits(), 4))
    with pytest.raises(Absent):
        await whole(ConnectionPool(UpstreamUrl("no-such-host.invalid", 1, False), ConnectionLimits(), 4))


async def test_connections_that_could_not_be_made_take_no_room() -> None:
    with socket.socket() as deaf:
        deaf.bind(("127.0.0.1", 0))
        pool = ConnectionPool(UpstreamUrl("127.0.0.1", deaf.getsockname()[1], False), ConnectionLimits(), 1)
        for _ in range(3):
            with pytest.raises(Absent):
                await whole(pool)
    pool.close()


async def test_a_kept_connection_that_breaks_for_good_is_a_break() -> None:
    async with Peer() as peer:
        pool = ConnectionPool(peer.url, ConnectionLimits(idle_s=WAIT_S), 4)
        assert await whole(pool) == b"{}"
        assert len(pool._idle) == 1
        peer.says = None
        peer.server.close()  # no second connection is accepted
        with pytest.raises(Broke) as broke:
            await whole(pool)
        assert not broke.value.begun
        with pytest.raises(Absent):
            await whole(pool)
        pool.close()


async def test_what_is_broken_off_is_not_sent_to_the_same_server_again() -> None:
    async with Peer() as peer:
        pool = ConnectionPool(peer.url, ConnectionLimits(idle_s=WAIT_S), 4)
        assert await whole(pool) == b"{}"
        peer.says = b""
        asked = asyncio.ensure_future(whole(pool))
        await asyncio.sleep(0)
        assert not pool._idle, "it is on the kept connection"
        pool.break_unanswered()
        with pytest.raises(Broke, match="stopped answering"):
            await asyncio.wait_for(asked, WAIT_S)
        assert peer.connections == 1
        pool.close()


async def test_a_server_with_tls_must_be_who_it_is(tmp_path) -> None:
    authority = TestAuthority(tmp_path)
    folder = authority.folder("lb", "x")
    peer = Peer()
    peer.tls = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER)
    peer.tls.load_cert_chain(folder / "tls.crt", folder / "tls.key")
    async with peer:
        known = ssl.create_default_context(cafile=str(folder / "ca.crt"))
        url = UpstreamUrl("localhost", peer.url.port, True)
        pool = ConnectionPool(url, ConnectionLimits(), 4, known)
        assert await whole(pool) == b"{}"
        assert await whole(pool) == b"{}"
        pool.close()
        with pytest.raises(Absent):
            await whole(ConnectionPool(url, ConnectionLimits(), 4, ssl.create_default_context()))


class Unread(asyncio.Transport):
    """A destination that accepts everything."""

    def write(self, data: object) -> None: ...

    def abort(self) -> None: ...


@pytest.mark.parametrize("fields", [b"upgrade: x\r\nconnection: upgrade\r\n", b""])
async def test_a_server_that_switches_protocols_gave_no_answer(fields: bytes) -> None:
    connection = UpstreamConnection(asyncio.get_running_loop(), ConnectionLimits(), lambda *_: None)
    connection.connection_made(Unread())
    answer = connection.send(b"POST / HTTP/1.1\r\n\r\n", b"", WAIT_S)
    connection.data_received(b"HTTP/1.1 101 Switching Protocols\r\n" + fields + b"\r\n")
    with pytest.raises(Broke, match="not valid HTTP"):
        await answer.read()
    assert not connection.usable
    connection.connection_lost(None)
