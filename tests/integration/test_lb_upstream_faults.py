"""Faults of other makers' servers, and what their clients see."""

from __future__ import annotations

import asyncio
import contextlib
import json

import pytest

from tests.integration.lb_harness import WAIT_S, Connection, spin
from tests.integration.upstream_parts import (
    DONE,
    DROP,
    MODEL,
    STALL,
    Asked,
    FakeServer,
    Wire,
    after,
    answers,
    generate,
    never,
    running_upstreams,
    says,
    streams,
    unless_poisoned,
)
from tests.virtual_time import VirtualTime

GIVEN_UP_TURNS = 50
"""Turns of the loop until a waiting request is given up, for which nothing comes over the network."""


BUSY = b'{"error":"busy"}'
CUT = streams(b'data: {"n":1}\n\ndata: {"n":', DROP)
"""A stream that breaks off in an event."""


# ---------------------------------------------------------------- sent again


@pytest.mark.parametrize(
    "answer",
    [
        says(DROP),
        answers(status=503),
        answers(status=429),
        answers(status=502),
        answers(BUSY, 503, "retry-after: 1\r\n"),
    ],
    ids=["dropped", "503", "429", "502", "retry-after"],
)
async def test_another_server_gets_what_one_fails(answer) -> None:
    wrong, sound = FakeServer(answer=answer), FakeServer()
    async with running_upstreams(wrong, sound, routing="round_robin") as bench:
        for _ in range(4):
            assert (await bench.chat()).status == 200
        assert wrong.asked
        assert len(sound.asked) == 4
        await bench.idle()


async def test_no_other_server_is_asked_once_an_answer_has_begun() -> None:
    half = b"HTTP/1.1 200 OK\r\ncontent-type: application/json\r\ncontent-length: 100\r\n\r\n{"
    wrong, other = FakeServer(answer=says(half, DROP)), FakeServer()
    async with running_upstreams(wrong, other) as bench:
        await bench.fill(other)  # no other request is sent there
        reply = await bench.chat()
        assert reply.status == 502
        assert reply.json["error"]["code"] == "bad_gateway"
        assert str(wrong.port) not in reply.body.decode()
        assert bench.asked == [1, 0]
        await bench.idle()


async def test_attempts_are_bounded_and_the_last_refusal_is_passed_on() -> None:
    servers = [FakeServer() for _ in range(5)]
    for server in servers:
        server.answer = answers(b'{"error":"theirs"}', 429, "retry-after: 7\r\nx-ratelimit-limit-requests: 9\r\n")
    async with running_upstreams(*servers, attempts=3) as bench:
        reply = await bench.chat()
        assert reply.status == 429
        assert reply.headers["retry-after"] == "7"
        assert reply.body == b'{"error":"theirs"}'
        assert sum(bench.asked) == 3
        await bench.idle()


async def test_a_refusal_of_the_only_server_is_passed_on() -> None:
    server = FakeServer(answer=answers(BUSY, 503, "retry-after: 3\r\n"))
    async with running_upstreams(server) as bench:
        for _ in range(3):
            reply = await bench.chat()
            assert (reply.status, reply.body, reply.headers["retry-after"]) == (503, BUSY, "3")
        server.answer = generate
        assert (await bench.chat()).status == 200


async def test_who_asks_to_be_left_alone_is() -> None:
    full, other = FakeServer(answer=answers(BUSY, 429, "retry-after: 600\r\n")), FakeServer()
    async with running_upstreams(full, other, routing="round_robin") as bench:
        for _ in range(10):
            assert (await bench.chat()).status == 200
        assert bench.asked == [1, 10]


async def test_a_kept_connection_that_the_server_closes_is_no_failure() -> None:
    async def once(asked: Asked, wire: Wire) -> None:
        """Answers, and closes the connection without announcing it when it is used again."""
        answered[wire.writer] = wire.writer not in answered
        await (generate if answered[wire.writer] else says(DROP))(asked, wire)

    answered: dict[object, bool] = {}
    server = FakeServer(answer=once)
    async with running_upstreams(server) as bench:
        for _ in range(5):
            assert (await bench.chat()).status == 200
        assert bench.gauge("retries_total") == 0
        assert bench.gauge("upstream_answers_total", upstream=server.url, status="0") == 0


async def test_a_request_that_kills_servers_gets_no_fourth_one() -> None:
    servers = [FakeServer() for _ in range(8)]

    async def dies(asked: Asked, wire: Wire) -> None:
        next(server for server in servers if asked in server.asked).kill()

    for server in servers:
        server.answer = unless_poisoned(dies)
    settings = {"attempts": 3, "upstream_keep_alive_s": WAIT_S, "upstream_health_s": WAIT_S}
    async with running_upstreams(*servers, routing="round_robin", **settings) as bench:
        while not all(bench.asked):
            assert (await bench.chat()).status == 200
        assert all(server.pool._idle for server in bench.lb.fleet.servers.values())
        assert (await bench.chat(poison=1)).status == 502
        assert sum(server.alive for server in servers) == 5
        assert (await bench.chat()).status == 200
        await bench.idle()


async def test_a_request_that_breaks_connections_is_sent_four_times() -> None:
    """Four at most: if the server restarts at the same address, a new connection counts as an attempt, too."""
    servers = [FakeServer(answer=unless_poisoned(says(DROP))) for _ in range(8)]
    settings = {"attempts": 3, "upstream_keep_alive_s": WAIT_S, "upstream_health_s": WAIT_S}
    async with running_upstreams(*servers, routing="round_robin", **settings) as bench:
        while not all(bench.asked):
            assert (await bench.chat()).status == 200
        assert (await bench.chat(poison=1)).status == 502
        assert sum("poison" in asked.json for server in servers for asked in server.asked) == 4
        assert (await bench.chat()).status == 200
        await bench.idle()


BEGUN = b"HTTP/1.1 503 X\r\nretry-after: 3\r\ncontent-type: x/y\r\ncontent-length: 100\r\n\r\n{"
"""A refusal that is shorter than its head announces."""
PARTIAL = pytest.mark.parametrize(
    "answer",
    [says(BEGUN, STALL), says(BEGUN, DROP), answers(b"x" * 70_000, 503, "retry-after: 3\r\n")],
    ids=["stalled", "cut off", "too large"],
)


@PARTIAL
async def test_another_server_gets_what_is_refused_in_part(answer) -> None:
    wrong, sound = FakeServer(answer=answer), FakeServer()
    async with running_upstreams(wrong, sound, routing="round_robin") as bench:
        for _ in range(2):
            assert (await bench.chat()).status == 200
        assert bench.asked == [1, 2]
        await bench.idle()


@PARTIAL
async def test_a_refusal_that_is_not_whole_is_told_by_its_status(answer) -> None:
    server = FakeServer(answer=answer)
    async with running_upstreams(server) as bench:
        reply = await bench.chat()
        assert (reply.status, reply.headers["retry-after"]) == (503, "3")
        assert reply.headers["content-type"] == "application/json"
        said = reply.json["error"]
        assert (said["code"], said["message"]) == ("unavailable", "The server refused the request.")
        await bench.idle()


def test_the_text_of_a_refusal_is_waited_for_one_second() -> None:
    """The virtual time passes only while nothing is to be done, so other load on the machine does not matter."""

    async def seconds() -> float:
        loop, server = asyncio.get_running_loop(), FakeServer(answer=says(BEGUN, STALL))
        async with running_upstreams(server, clock=loop.time) as bench:
            began_s = loop.time()
            assert (await bench.chat()).status == 503
            took_s = loop.time() - began_s
            await bench.idle()
        return took_s

    with asyncio.Runner(loop_factory=VirtualTime) as runner:
        assert 0.9 < runner.run(seconds()) < 2


@pytest.mark.parametrize("stream", [False, True])
async def test_a_stopped_server_does_not_keep_its_requests(stream: bool) -> None:
    stopped, sound = FakeServer(), FakeServer()
    settings = {"upstream_health_timeout_s": 0.3, "upstream_keep_alive_s": WAIT_S}
    async with running_upstreams(stopped, sound, **settings) as bench:
        await bench.fill(sound)  # no other request is sent there
        assert (await bench.chat()).status == 200
        stopped.frozen = True
        asked = [asyncio.ensure_future(bench.chat(stream=stream)) for _ in range(3)]
        await spin(lambda: bench.gauge("in_flight_requests") + bench.gauge("queue_requests") == 3)
        sound.waiting = 0
        await bench.until(lambda: bench.live(sound))
        known = bench.lb.fleet.servers[stopped.url]
        for _ in range(GIVEN_UP_TURNS):
            if not known.outstanding:
                break
            await asyncio.sleep(0)
        assert not known.outstanding, "what it has not begun to answer goes elsewhere once it is known to be silent"
        for reply in await asyncio.gather(*asked):
            assert reply.status == 200
        assert bench.asked == [1, 3]
        stopped.frozen = False
        await bench.until(lambda: bench.live(stopped, sound))


async def test_who_only_says_it_is_not_well_keeps_its_requests() -> None:
    go = asyncio.Event()
    ill, other = FakeServer(answer=after(go)), FakeServer()
    async with running_upstreams(ill, other) as bench:
        await bench.fill(other)
        asked = asyncio.ensure_future(bench.chat())
        await spin(lambda: ill.open == 1)
        other.waiting = 0
        ill.health = 503
        await bench.until(lambda: bench.live(other))
        go.set()
        assert (await asked).status == 200
        assert bench.asked == [1, 0]


# ---------------------------------------------------------------- in mid-stream


async def test_a_broken_stream_ends_with_one_error_and_repeats_nothing() -> None:
    server, other = FakeServer(answer=CUT), FakeServer(answer=CUT)
    async with running_upstreams(server, other) as bench:
        reply = await bench.chat(stream=True)
        assert reply.status == 200
        first, error, last = reply.events
        assert first == '{"n":1}'
        said = json.loads(error)["error"]
        assert said["code"] == "bad_gateway"
        assert said["type"] == "server_error"
        assert last == "[DONE]"
        assert sum(bench.asked) == 1
        assert bench.gauge("http_broken_streams_total", error="unavailable") == 1
        await bench.idle()


@pytest.mark.parametrize(
    ("path", "kind", "message"),
    [
        ("/v1/messages", "error", lambda said: said["error"]["message"]),
        ("/v1/responses", "error", lambda said: said["message"]),
    ],
)
async def test_errors_in_streams_are_in_the_words_of_their_route(path: str, kind: str, message) -> None:
    server = FakeServer(answer=CUT)
    async with running_upstreams(server) as bench:
        reply = await bench.post(path, {"model": MODEL, "stream": True})
        first, last, end = reply.body.split(b"\n\n")
        assert first == b'data: {"n":1}'
        assert end == b""
        name, data = last.split(b"\n")
        assert name == b"event: error"
        said = json.loads(data.removeprefix(b"data: "))
        assert said["type"] == kind
        assert "closed the connection" in message(said)


@pytest.mark.parametrize(
    ("last", "whole"),
    [
        (b'event: message_stop\ndata: {"type":"message_stop"}\n\n', True),
        (b'event: response.completed\ndata: {"type":"response.completed"}\n\n', True),
        (b'data: {"text":"event: message_stop"}\n\n', False),
        (b'data: {"text":"data: [DONE]"}\n\n', False),
    ],
)
async def test_other_ends_of_streams(last: bytes, whole: bool) -> None:
    server = FakeServer(answer=streams(b"data: 1\n\n" + last, DROP))
    async with running_upstreams(server) as bench:
        body = (await bench.post("/v1/messages", {"model": MODEL, "stream": True})).body
        assert (b"event: error" not in body) is whole


async def test_a_server_that_is_killed_in_mid_stream() -> None:
    server, other = FakeServer(answer=streams(b"data: 1\n\n", STALL)), FakeServer()
    async with running_upstreams(server, other) as bench:
        await bench.fill(other)
        async with contextlib.AsyncExitStack() as stack:
            clients = [await stack.enter_async_context(Connection(bench.http)) for _ in range(3)]
            for client in clients:
                client.send(
                    "POST", "/v1/completions", json.dumps({"model": MODEL, "stream": True, "prompt": "a"}).encode()
                )
            for client in clients:
                assert (await client.head())[0] == 200
                assert await client.chunk() == b"data: 1\n\n"
            other.waiting = 0
            await server.stop()
            for client in clients:
                last = await client.chunk()
                assert b'"bad_gateway"' in last
                assert last.endswith(DONE)
                assert not await client.chunk()
        await bench.until(lambda: bench.live(other))
        assert (await bench.chat(stream=True)).body.endswith(DONE)


async def test_a_stream_that_had_said_all_may_end_as_it_likes() -> None:
    server = FakeServer(answer=streams(b"data: 1\n\n" + DONE, DROP))
    async with running_upstreams(server) as bench:
        assert (await bench.chat(stream=True)).events == ["1", "[DONE]"]


async def test_a_stream_that_stops_coming() -> None:
    server = FakeServer(answer=streams(b"data: 1\n\n", STALL))
    async with running_upstreams(server, upstream_stall_s=1.0) as bench:
        reply = await bench.chat(stream=True)
        assert "stopped coming" in reply.events[1]
        await bench.idle()


async def test_a_stream_that_does_not_begin_goes_elsewhere() -> None:
    slow, other = FakeServer(answer=never), FakeServer()
    async with running_upstreams(slow, other, upstream_first_byte_s=1.0) as bench:
        await bench.fill(other)
        asked = asyncio.ensure_future(bench.chat(stream=True))
        await spin(lambda: slow.open == 1)
        other.waiting = 0
        assert (await asked).body.endswith(DONE)
        assert slow.left == 1
        assert bench.asked == [1, 1]


async def test_a_long_whole_answer_that_breaks_off_ends_the_connection() -> None:
    server = FakeServer(answer=streams(*[b"x" * 100_000] * 10, DROP, kind="application/json"))
    async with running_upstreams(server) as bench:
        async with Connection(bench.http) as connection:
            connection.send("POST", "/v1/completions", json.dumps({"model": MODEL}).encode())
            assert (await connection.head())[0] == 200
            with pytest.raises((asyncio.IncompleteReadError, ConnectionResetError)):
                await _all_chunks(connection)
        await bench.idle()


async def _all_chunks(connection: Connection) -> None:
    while await connection.chunk():
        pass


@pytest.mark.parametrize("stream", [False, True])
async def test_a_request_has_a_deadline(stream: bool) -> None:
    server = FakeServer(answer=streams(b"data: 1\n\n", STALL) if stream else never)
    async with running_upstreams(server, request_timeout_s=1.5) as bench:
        reply = await bench.chat(stream=stream)
        if stream:
            assert "--request-timeout-s" in reply.events[1]
        else:
            assert reply.status == 504
        await spin(lambda: server.left == 1)
        await bench.idle()


# ---------------------------------------------------------------- invalid answers


@pytest.mark.parametrize(
    "raw",
    [
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ncontent-length: 6\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 5\r\ntransfer-encoding: chunked\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: gzip\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: -5\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ncontent-length: 99999999999999999999\r\n\r\nhello",
        b"HTTP/1.1 101 Switching Protocols\r\nupgrade: x\r\nconnection: upgrade\r\n\r\nhello",
        b"HTTP/1.1 200 OK\r\ntransfer-encoding: chunked\r\n\r\nzz\r\nhello\r\n",
        b"HTTP/1.1 200 OK\r\nx: a\nb\r\n\r\n",
        b"HTTP/1.1 200 OK\r\n" + b"x: y\r\n" * 300 + b"content-length: 0\r\n\r\n",
        b"HTTP/1.1 200 OK\r\nx: " + b"y" * 100_000 + b"\r\n\r\n",
        b"HTTP/1.1 100 Continue\r\n\r\n" * 40,
        b"HTTP/9.9 200 OK\r\n\r\n",
        b"HTTP/1.1 000 X\r\ncontent-length: 0\r\n\r\n",
        b"HTTP/1.1 099 X\r\ncontent-length: 2\r\n\r\n{}",
        b"\0" * 1000,
    ],
)
async def test_what_is_no_answer_is_a_bad_gateway(raw: bytes) -> None:
    server = FakeServer(answer=says(raw))
    async with running_upstreams(server) as bench:
        reply = await bench.chat()
        assert reply.status == 502
        server.answer = generate
        assert (await bench.chat()).status == 200
        await bench.idle()


@pytest.mark.parametrize("trailers", [b"set-cookie: a=b\r\n", b"content-type: text/html\r\n", b"x: " + b"y" * 40_000])
async def test_trailers_of_an_answer_do_not_become_fields(trailers: bytes) -> None:
    server = FakeServer()
    head = b"HTTP/1.1 200 OK\r\ncontent-type: text/plain\r\ntransfer-encoding: chunked\r\n\r\n"
    server.answer = says(head + b"2\r\n{}\r\n0\r\n" + trailers.rstrip() + b"\r\n\r\n")
    async with running_upstreams(server) as bench:
        for _ in range(2):
            reply = await bench.chat()
            assert (reply.status, reply.body, reply.headers["content-type"]) == (200, b"{}", "text/plain")
            assert reply.headers.keys().isdisjoint({"set-cookie", "x"})
        server.answer = says(head + b"2\r\n{}\r\n0\r\n" + (b"x: " + b"y" * 1000 + b"\r\n") * 100 + b"\r\n")
        assert (await bench.chat()).status == 502
        await bench.idle()


async def test_what_follows_an_answer_is_not_taken_for_the_next_one() -> None:
    server = FakeServer()
    whole = b"HTTP/1.1 200 OK\r\ncontent-type: a\r\ncontent-length: 2\r\n\r\n{}"
    server.answer = says(whole + b"HTTP/1.1 200 OK\r\ncontent-length: 4\r\n\r\nevil")
    async with running_upstreams(server) as bench:
        for _ in range(3):
            assert (await bench.chat()).body == b"{}"
        server.answer = generate
        assert b"an answer" in (await bench.chat()).body


# ---------------------------------------------------------------- breakers and probes


async def test_who_fails_is_left_out_and_tried_again() -> None:
    wrong, sound = FakeServer(answer=answers(status=500)), FakeServer()
    async with running_upstreams(wrong, sound, routing="round_robin") as bench:
        statuses = [(await bench.chat()).status for _ in range(40)]
        failures = statuses.count(500)
        assert 5 <= failures < 15  # then it gets a request now and then
        wrong.answer = generate
        before = len(wrong.asked)
        async with asyncio.timeout(WAIT_S):
            while len(wrong.asked) < before + 3:
                assert (await bench.chat()).status == 200
                await bench.lb.fleet.wait_change(0.02)
        assert bench.live(wrong, sound)


async def test_a_client_whose_requests_break_servers_stops_no_others() -> None:
    servers = [FakeServer(answer=unless_poisoned(answers(status=500))) for _ in range(3)]
    async with running_upstreams(*servers, routing="round_robin") as bench:
        for _ in range(60):
            assert (await bench.chat(poison=1)).status == 500
        assert (await bench.chat()).status == 200


async def test_an_absent_server_is_noticed_by_the_first_request() -> None:
    gone, sound = FakeServer(), FakeServer()
    async with running_upstreams(gone, sound, upstream_health_s=30, routing="round_robin") as bench:
        await gone.stop()
        for _ in range(4):
            assert (await bench.chat()).status == 200
        assert bench.live(sound)
        assert bench.gauge("retries_total") <= 2


async def test_a_server_that_comes_back_has_an_empty_cache() -> None:
    first, other = FakeServer(), FakeServer()
    async with running_upstreams(first, other, upstream_capacity=8) as bench:
        text = "the same beginning " * 100
        await bench.chat(text)
        holder, free = (first, other) if first.asked else (other, first)
        await holder.stop()
        await bench.until(lambda: bench.live(free))
        assert (await bench.chat(text)).status == 200
        await holder.start()
        await bench.until(lambda: bench.live(first, other))
        await bench.known()
        before = len(free.asked)
        for _ in range(4):
            await bench.chat(text)
        assert len(free.asked) == before + 4


async def test_a_request_waits_for_a_server_and_gets_503_if_none_comes() -> None:
    server = FakeServer()
    async with running_upstreams(server, placement_wait_s=0.2) as bench:
        await server.stop()
        await bench.until(lambda: bench.live())
        reply = await bench.chat()
        assert reply.status == 503
        assert MODEL in reply.json["error"]["message"]
        assert (await bench.get("/health/ready")).status == 503
        await bench.idle()
    server = FakeServer()
    async with running_upstreams(server, placement_wait_s=WAIT_S) as bench:
        await server.stop()
        await bench.until(lambda: bench.live())
        waits = asyncio.ensure_future(bench.chat())
        await spin(lambda: bench.gauge("queue_requests") == 1)
        await server.start()
        assert (await waits).status == 200


async def test_a_server_that_comes_back_full_is_waited_for() -> None:
    server = FakeServer()
    async with running_upstreams(server, placement_wait_s=WAIT_S) as bench:
        await server.stop()
        await bench.until(lambda: bench.live())
        waits = asyncio.ensure_future(bench.chat())
        await spin(lambda: bench.gauge("queue_requests") == 1)
        served = bench.lb.fleet.models[MODEL]
        assert served._alone is not None
        server.waiting = 1
        await server.start()
        await bench.until(lambda: bench.live(server))
        assert served._alone is None  # a server is there, so the queue's own time limit counts
        server.waiting = 0
        assert (await waits).status == 200


async def test_who_waits_when_the_last_server_goes_is_told() -> None:
    server = FakeServer()
    async with running_upstreams(server, placement_wait_s=0.2) as bench:
        await bench.fill(server, 5)
        waits = [asyncio.ensure_future(bench.chat()) for _ in range(3)]
        await spin(lambda: bench.gauge("queue_requests") == 3)
        await server.stop()
        assert {reply.status for reply in await asyncio.gather(*waits)} == {503}
        await bench.idle()


async def test_a_server_that_says_it_is_not_well_gets_nothing() -> None:
    ill, sound = FakeServer(), FakeServer()
    async with running_upstreams(ill, sound) as bench:
        ill.health = 503
        await bench.until(lambda: bench.live(sound))
        for _ in range(4):
            await bench.chat()
        assert bench.asked == [0, 4]
        ill.health = 200
        await bench.until(lambda: bench.live(ill, sound))


async def test_a_frozen_server_gets_nothing_more() -> None:
    frozen, sound = FakeServer(), FakeServer()
    async with running_upstreams(frozen, sound, upstream_health_timeout_s=1.0) as bench:
        frozen.frozen = True
        await bench.until(lambda: bench.live(sound))
        for _ in range(4):
            assert (await bench.chat()).status == 200
        frozen.frozen = False
        await bench.until(lambda: bench.live(frozen, sound))


async def test_slow_metrics_do_not_pile_up_and_say_nothing_meanwhile() -> None:
    slow, quick = FakeServer(), FakeServer()
    async with running_upstreams(slow, quick, pushing="pending:stale_s=0.2") as bench:
        slow.go.clear()
        await spin(lambda: slow.asking == 1)
        layer = bench.lb.fleet.models[MODEL].layers.local
        await bench.until(lambda: [each.name for each in layer.available(bench.lb.line._clock())] == [quick.url])
        for _ in range(3):
            assert (await bench.chat()).status == 200
        assert bench.asked == [0, 3]
        assert slow.asking_most == 1
        slow.go.set()
        await bench.until(lambda: len(layer.available(bench.lb.line._clock())) == 2)


async def test_metrics_that_go_away_are_done_without() -> None:
    server = FakeServer()
    async with running_upstreams(server) as bench:
        known = bench.lb.fleet.servers[server.url]
        assert known.kind is not None
        server.metrics = False
        await bench.until(lambda: known.kind is None)
        assert (await bench.chat()).status == 200
