"""Clients that are hostile or broken: the memory they make the load balancer hold, and their effect on others."""

from __future__ import annotations

import asyncio
import contextlib
import json
import random
import signal
import socket
import threading
import time

import pytest

from pinyon.frontdoor import metrics
from pinyon.http.connection import DROPPED_BYTES, State
from pinyon.openai.parse import parse_completion
from tests.hostile_http import NEVER_ENDING, flood
from tests.integration.lb_harness import MODEL, WAIT_S, Bench, Connection, ask, live_lb, running_lb, spin

SEED = 20_261_122


# ---------------------------------------------------------------- memory


@pytest.mark.parametrize(("begin", "piece", "status"), NEVER_ENDING)
async def test_what_never_ends_is_cut_and_costs_no_memory(tmp_path, begin, piece, status):
    """An endless request of 6 MB; an earlier version held 72 MB for a head and 73 MB for trailers."""
    async with live_lb(tmp_path) as lb:
        before = lb.memory_bytes
        async with Connection(lb.http) as connection:
            connection.writer.write(begin.encode("latin-1"))
            await flood(connection.reader, connection.writer, piece, 6_000_000)
            assert lb.memory_bytes - before < 12_000_000
            assert (await connection.reply()).status == status
        assert (await lb.get("/health")).status == 200


async def test_many_connections_hold_little_each(tmp_path, keys):
    """Connections with 400 unfinished heads and 400 bodies without a valid key."""
    async with live_lb(tmp_path, api_keys_file=keys) as lb, contextlib.AsyncExitStack() as stack:
        before = lb.memory_bytes
        unfinished = b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nx: " + b"a" * 20_000
        stranger = b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nContent-Length: 50000\r\n\r\n" + b"a" * 40_000
        for number in range(800):
            connection = await stack.enter_async_context(Connection(lb.http))
            connection.writer.write(unfinished if number % 2 else stranger)
            if not number % 2:
                assert (await connection.reply()).status == 401
        assert await lb.gauge("http_connections") > 400
        assert lb.memory_bytes - before < 800 * 64_000


async def test_a_flood_of_pipelined_requests_is_not_kept(tmp_path):
    async with live_lb(tmp_path) as lb:
        lb.workers[0].hold()
        before = lb.memory_bytes
        async with lb.asking(max_tokens=2) as connection:
            await lb.workers[0].until(lambda: lb.workers[0].open)
            pipelined = b"GET /health HTTP/1.1\r\nHost: lb\r\n\r\n" * 500
            assert await flood(connection.reader, connection.writer, pipelined, 100 << 20) < DROPPED_BYTES + (16 << 20)
            assert lb.memory_bytes - before < 12_000_000
            await lb.workers[0].until(lambda: lb.workers[0].cancelled)
            await lb.idle()


@pytest.mark.parametrize("packet", ["one", "two"])
async def test_a_trailer_is_no_header(keys, packet):
    body = ask(max_tokens=1)
    head = b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nTransfer-Encoding: chunked\r\n"
    chunks = b"\r\n%x\r\n%b\r\n0\r\nx-pinyon-user: eve\r\nAuthorization: Bearer sk-a\r\n\r\n" % (len(body), body)
    async with running_lb(api_keys_file=keys) as bench:
        async with Connection(bench.http) as connection:
            connection.writer.write(head)
            if packet == "two":
                await connection.writer.drain()
            connection.writer.write(chunks)
            assert (await connection.reply()).status == 401
        async with Connection(bench.http) as connection:
            connection.writer.write(head + b"Authorization: Bearer sk-a\r\n" + chunks)
            assert (await connection.reply()).status == 200
        assert bench.workers[0].submissions[0].request_class.user == ""


# ---------------------------------------------------------------- answers before the body


async def test_who_has_no_key_or_no_place_is_told_before_the_body(keys):
    async with running_lb(api_keys_file=keys, in_flight_limit=1, queue_limit=0) as bench:
        bench.workers[0].hold()
        key = {"authorization": "Bearer sk-a"}
        length = {"content-length": "3000000"}
        running = asyncio.ensure_future(bench.complete(headers=key, max_tokens=1))
        await spin(lambda: bench.gauge("in_flight_requests") == 1)
        for headers, status in [(length, 401), (length | key, 429)]:
            async with Connection(bench.http) as connection:
                connection.send("POST", "/v1/completions", None, headers)
                assert (await connection.reply()).status == status
        bench.workers[0].go.set()
        assert (await running).status == 200
        await bench.idle()


# ---------------------------------------------------------------- clients that leave


@pytest.mark.parametrize("size", [2_000, 90_000, 200_000])
@pytest.mark.parametrize("how", ["reset", "closed", "pipelined"])
async def test_who_leaves_is_noticed_whatever_the_body(tmp_path, size, how):
    """A leaving client is noticed on every hop; before, a body of more than 64 KiB let the request run to its end."""
    async with live_lb(tmp_path) as lb:
        worker = lb.workers[0]
        worker.hold()
        async with lb.asking(size=size, max_tokens=3) as connection:
            await worker.until(lambda: worker.open)
            if how == "reset":
                linger = connection.writer.get_extra_info("socket")
                linger.setsockopt(socket.SOL_SOCKET, socket.SO_LINGER, b"\1\0\0\0\0\0\0\0")
                connection.drop()
            else:
                if how == "pipelined":  # more than is read ahead, so that reading has stopped
                    connection.writer.write(b"GET /health HTTP/1.1\r\nHost: lb\r\n\r\n" * 10_000)
                    await connection.writer.drain()
                connection.writer.close()
            await worker.until(lambda: worker.cancelled == [1])
            await lb.idle()


@pytest.mark.parametrize("size", [2_000, 200_000])
async def test_who_only_sends_nothing_more_is_still_there(tmp_path, size):
    """The event loop is the one of production."""
    async with live_lb(tmp_path) as lb:
        worker = lb.workers[0]
        worker.hold()
        async with lb.asking(size=size, max_tokens=3) as connection:
            await worker.until(lambda: worker.open)
            connection.writer.write_eof()
            # An interim answer, by which the server checks that the client is there.
            assert (await connection.head())[0] == 100
            worker.go.set()
            assert (await connection.reply()).status == 200
            assert await connection.reader.read() == b""
        await lb.idle()


# ---------------------------------------------------------------- slow clients


@pytest.mark.parametrize(
    "beginning",
    [
        b"P",
        b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nContent-Length: 100\r\nx:",
        b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nContent-Length: 100\r\n\r\n{",
        b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\nTransfer-Encoding: chunked\r\n\r\n5\r\n{",
    ],
)
async def test_who_drips_is_cut(beginning):
    async with running_lb(head_timeout_s=0.3, body_timeout_s=0.3) as bench, Connection(bench.http) as connection:
        connection.writer.write(beginning)
        reply = asyncio.ensure_future(connection.reply())
        async with asyncio.timeout(WAIT_S):
            while not reply.done():
                connection.writer.write(b" ")
                await asyncio.sleep(0.02)
        assert (await reply).status in (400, 408)


async def test_empty_lines_keep_no_connection_open():
    async with running_lb(keep_alive_s=1.0) as bench, Connection(bench.http) as connection:
        connection.send("GET", "/health")
        await connection.reply()
        closed = asyncio.ensure_future(connection.reader.read())
        async with asyncio.timeout(WAIT_S):
            while not closed.done():
                connection.writer.write(b"\r\n")
                await asyncio.sleep(0.02)


async def test_metrics_do_not_take_the_loop(monkeypatch):
    """Four connections that asked only for metrics, without a key, held up all others for 5 s."""
    made = 0

    def make(_) -> bytes:
        nonlocal made
        made += 1
        time.sleep(0.02)
        return b"%d" % made

    monkeypatch.setattr(metrics, "generate_latest", make)
    async with running_lb() as bench:
        began_s = time.monotonic()
        async with Connection(bench.http) as connection:
            for _ in range(100):
                connection.send("GET", "/metrics")
            for _ in range(100):
                assert (await connection.reply()).status == 200
        assert made <= 1 + (time.monotonic() - began_s) / (0.02 * metrics.PAGE_REST)
        async with asyncio.timeout(60):
            while int((await bench.get("/metrics")).body) == 1:  # noqa: ASYNC110  # it is good for a while
                await asyncio.sleep(0.02)
        assert made > 1


# ---------------------------------------------------------------- oversized requests


async def loop_s(bench: Bench, body: bytes, status: int) -> float:
    """Returns the least time that the loop's thread computes for a request; other load on the machine only adds."""
    found = []
    for _ in range(3):
        begun_s = time.thread_time()
        assert (await bench.post("/v1/completions", body)).status == status
        found.append(time.thread_time() - begun_s)
    return min(found)


async def test_a_large_body_does_not_hold_up_the_loop():
    """Parsing the body takes several times as long as the loop's thread may."""
    tokens = random.Random(SEED).choices(range(256), k=1_100_000)
    body = json.dumps({"model": MODEL, "prompt": tokens}, separators=(",", ":")).encode()
    assert 3_900_000 < len(body) < 4 << 20
    async with running_lb() as bench:
        reply = await bench.post("/v1/completions", body)
        assert (reply.status, reply.json["error"]["code"]) == (400, "context_length_exceeded")
        used_s = await loop_s(bench, body, 400)
    begun_s = time.thread_time()
    parse_completion(body)
    read_s = time.thread_time() - begun_s
    print(f"{used_s:.3f} s of {read_s:.3f} s")
    assert used_s < read_s / 2


@pytest.mark.parametrize(("tokens", "beside"), [(8, False), (300_000, True)])
async def test_large_bodies_are_read_beside_the_loop(tokens, beside, monkeypatch):
    readers = []

    def parse(body):
        readers.append(threading.current_thread())
        return parse_completion(body)

    monkeypatch.setattr("pinyon.frontdoor.instances.routes.parse_completion", parse)
    body = json.dumps({"model": MODEL, "prompt": [1] * tokens, "max_tokens": 1}, separators=(",", ":")).encode()
    async with running_lb() as bench:
        await bench.post("/v1/completions", body)
    assert [reader is not threading.main_thread() for reader in readers] == [beside]


BOMBS = {
    "messages": lambda: b'{"messages":[' + b",".join([b'{"role":"user","content":"a"}'] * 100_000) + b"]}",
    "names": lambda: b'{"metadata":{' + b",".join(b'"%d":1' % number for number in range(300_000)) + b"}}",
    "depth": lambda: b'{"stop":' + b"[" * 2_000_000,
    "numbers": lambda: b'{"prompt":[' + b"1," * 1_000_000 + b"]}",
    "no commas": lambda: b'{"prompt":[' + b"1 " * 1_000_000 + b"]}",
    "large numbers": lambda: b'{"prompt":[' + b"99999999999," * 200_000 + b"1]}",
    "backslashes": lambda: b'{"prompt":"' + b"\\" * 4_000_000,
}
"""Bodies that are made when they are sent, as every worker of pytest-xdist collects all tests."""


@pytest.mark.parametrize("bomb", BOMBS)
async def test_bombs_of_json_are_refused(bomb):
    body = BOMBS[bomb]()
    async with running_lb() as bench:
        used_s = await loop_s(bench, body, 400)
        print(f"{used_s:.3f} s")
        assert used_s < 0.15


async def test_bodies_in_all_are_bounded():
    """The limit is 1 MiB, and two requests hold 600 kB each."""
    async with running_lb(bodies_limit_mib=1) as bench:
        bench.workers[0].hold()
        first = asyncio.ensure_future(bench.post("/v1/completions", ask(size=600_000, max_tokens=1)))
        await bench.workers[0].until(lambda: bench.workers[0].open)
        refused = await bench.post("/v1/completions", ask(size=600_000, max_tokens=1))
        assert (refused.status, refused.headers["retry-after"]) == (503, "1")
        assert (await bench.complete("small", max_tokens=0)).status == 400
        bench.workers[0].go.set()
        assert (await first).status == 200
        assert (await bench.post("/v1/completions", ask(size=600_000, max_tokens=1))).status == 200


@pytest.mark.parametrize("limit", ["connections_limit", "connections_per_peer"])
async def test_connections_are_bounded_in_all_and_of_one_address(limit):
    async with running_lb(**{limit: 2}) as bench:
        async with Connection(bench.http) as one, Connection(bench.http) as two, Connection(bench.http) as three:
            for connection in (one, two):
                connection.send("GET", "/health")
                assert (await connection.reply()).status == 200
            assert (await three.reply()).status == 503
            assert await three.reader.read() == b""
        await spin(lambda: not bench.lb.http._shared.connections)
        assert (await bench.get("/health")).status == 200


async def test_an_address_that_a_trusted_proxy_names_has_its_share():
    async with running_lb(connections_per_peer=1, requests_per_peer=1, trusted_proxies="127.0.0.0/8") as bench:
        bench.workers[0].hold()
        eve = {"x-forwarded-for": "192.0.2.1, 198.51.100.7"}
        first = asyncio.ensure_future(bench.complete(headers=eve, max_tokens=1))
        await bench.workers[0].until(lambda: bench.workers[0].open)
        spoofed = {"x-forwarded-for": "203.0.113.5, 198.51.100.7"}
        refused = await bench.complete(headers=spoofed, max_tokens=1)
        assert (refused.status, refused.headers["retry-after"]) == (429, "1")
        other = asyncio.ensure_future(bench.complete(headers={"x-forwarded-for": "198.51.100.8"}, max_tokens=1))
        await bench.workers[0].until(lambda: len(bench.workers[0].open) == 2)
        bench.workers[0].go.set()
        assert [(await first).status, (await other).status] == [200, 200]
        assert (await bench.complete(headers=spoofed, max_tokens=1)).status == 200


async def test_nobody_else_is_believed_for_whom_he_asks():
    """A client could otherwise use up another client's limit, or claim any number of names."""
    named = {"x-forwarded-for": "198.51.100.7"}
    async with running_lb(requests_per_peer=1, trusted_proxies="192.0.2.0/24") as bench:
        bench.workers[0].hold()
        both = [asyncio.ensure_future(bench.complete(headers=named, max_tokens=1)) for _ in range(2)]
        await bench.workers[0].until(lambda: len(bench.workers[0].open) == 2)
        bench.workers[0].go.set()
        assert [(await each).status for each in both] == [200, 200]


async def test_the_proxy_protocol_is_read_of_trusted_proxies_only():
    preface = b"PROXY TCP4 198.51.100.7 127.0.0.1 1000 80\r\n"
    async with (
        running_lb(proxy_protocol=True, trusted_proxies="127.0.0.1", connections_per_peer=1) as bench,
        Connection(bench.http) as one,
        Connection(bench.http) as two,
        Connection(bench.http) as three,
    ):
        for connection, begin, status in [(one, preface, 200), (two, preface, 503), (three, b"", 400)]:
            for byte in begin:
                connection.writer.write(bytes((byte,)))
                await connection.writer.drain()
            connection.send("GET", "/health")
            assert (await connection.reply()).status == status
    async with running_lb(proxy_protocol=True) as bench, Connection(bench.http) as connection:
        connection.writer.write(preface)
        connection.send("GET", "/health")
        assert (await connection.reply()).status == 400


async def test_a_refused_client_that_goes_on_sending_is_cut(tmp_path):
    async with live_lb(tmp_path) as lb, Connection(lb.http) as connection:
        connection.writer.write(b"NONSENSE\r\n\r\n")
        assert (await connection.reply()).status == 400
        assert await flood(connection.reader, connection.writer, b"x" * 100_000, 100 << 20) < DROPPED_BYTES + (16 << 20)


# ---------------------------------------------------------------- smuggling


@pytest.mark.parametrize(
    "fields", [b"Content-Length: 44\r\nTransfer-Encoding: chunked\r\n", b"Transfer-Encoding: identity, chunked\r\n"]
)
async def test_smuggled_requests_are_answered_by_nobody(fields):
    async with running_lb() as bench, Connection(bench.http) as connection:
        connection.writer.write(
            b"POST /v1/completions HTTP/1.1\r\nHost: lb\r\n"
            + fields
            + b"\r\n0\r\n\r\nGET /health HTTP/1.1\r\nHost: lb\r\n\r\n"
        )
        assert (await connection.reply()).status in (400, 501)
        assert await connection.reader.read() == b""


# ---------------------------------------------------------------- the end


async def test_a_lame_duck_serves_while_probes_are_told():
    async with running_lb() as bench:
        async with Connection(bench.http) as kept:
            kept.send("GET", "/health")
            assert "connection" not in (await kept.reply()).headers
            closing = asyncio.ensure_future(bench.lb.close(WAIT_S, lame_duck_s=WAIT_S))
            await spin(lambda: bench.lb.readiness.draining)
            ready = await bench.get("/health/ready")
            assert ready.status == 503
            assert "retry-after" not in ready.headers, "trying again does not help"
            reply = await bench.complete(max_tokens=2)
            assert (reply.status, reply.headers["connection"]) == (200, "close")
            kept.send("POST", "/v1/completions", ask(max_tokens=2))
            reply = await kept.reply()
            assert (reply.status, reply.headers["connection"]) == (200, "close")
        closing.cancel()
        await asyncio.gather(closing, return_exceptions=True)
        assert not bench.leftovers()


async def test_sigterm_makes_a_lame_duck(tmp_path):
    async with live_lb(tmp_path, lame_duck_s=WAIT_S) as lb:
        lb.process.signal(signal.SIGTERM)
        async with asyncio.timeout(WAIT_S):
            while (await lb.get("/health/ready")).status != 503:  # noqa: ASYNC110 - a process has no event for us
                await asyncio.sleep(0.01)
        assert (await lb.complete(max_tokens=2)).status == 200
        assert lb.process.alive


async def test_who_connected_in_time_is_answered():
    """Connections that the kernel made and the server has not accepted yet; closing the listener used to reset them."""
    async with running_lb() as bench:
        address = ("127.0.0.1", int(bench.http.rpartition(":")[2]))
        clients = [socket.create_connection(address, WAIT_S) for _ in range(20)]
        for client in clients:
            client.sendall(b"GET /health HTTP/1.1\r\nHost: lb\r\n\r\n")
        draining = asyncio.ensure_future(bench.lb.http.drain(WAIT_S))
        for client in clients:
            client.setblocking(False)
            reader, writer = await asyncio.open_connection(sock=client)
            async with asyncio.timeout(WAIT_S):
                assert (await reader.read()).startswith(b"HTTP/1.1 200 OK")
            writer.close()
        await draining
        with pytest.raises(ConnectionRefusedError):
            socket.create_connection(address, WAIT_S)


# ---------------------------------------------------------------- metrics


async def test_time_runs_from_the_head():
    """A body that arrives slowly is part of its client's waiting time."""
    async with running_lb() as bench, Connection(bench.http) as connection:
        body = ask(max_tokens=1)
        connection.send("POST", "/v1/completions", None, {"content-length": str(len(body)), "x-pinyon-report": "1"})
        await connection.writer.drain()
        await spin(lambda: any(each._state is not State.HEAD for each in bench.lb.http._shared.connections))
        loop = asyncio.get_running_loop()
        end_s = loop.time() + 0.3
        await spin(lambda: loop.time() > end_s)
        connection.writer.write(body)
        report = (await connection.reply()).json["pinyon"]
        assert report["ttft_ms"] >= 300
        assert bench.gauge("ttft_seconds_sum", model=MODEL) >= 0.3
