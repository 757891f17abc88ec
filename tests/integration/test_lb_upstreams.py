"""The load balancer in front of other makers' servers: what it forwards, what comes back, and where requests go."""

from __future__ import annotations

import asyncio
import json
import re

import grpc
import pytest

from pinyon.api.admin.v1 import admin_pb2, admin_pb2_grpc
from pinyon.frontdoor.answer import HIGH_BYTES
from pinyon.routing.server_load import SERVER_KINDS, ServerKind
from tests.integration.lb_harness import VERSION, WAIT_S, Connection, spin
from tests.integration.upstream_parts import (
    DONE,
    MODEL,
    STALL,
    Asked,
    FakeServer,
    Wire,
    after,
    answers,
    never,
    running_upstreams,
    says,
    streams,
)

# ---------------------------------------------------------------- requests are forwarded unchanged


async def test_a_request_and_its_answer_are_passed_on_unchanged() -> None:
    fields = "x-odd: yes\r\nx-request-id: theirs\r\nserver: uvicorn\r\nkeep-alive: timeout=9\r\n"
    server = FakeServer(answer=answers(b'{"odd":  [1,2 ]}', 201, fields))
    async with running_upstreams(server) as bench:
        body = b'{ "unknown":{"deep":[1, 2.50,null]},\n"model": "model-a", "messages":[], "temperature":1e-3 }'
        headers = {
            "authorization": "Bearer mine",
            "content-type": "application/json; charset=utf-8",
            "x-request-id": "abc",
            "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01",
            "connection": "x-hop",
            "x-hop": "1",
            "te": "trailers",
            "x-forwarded-for": "10.0.0.1",
            "accept-encoding": "gzip",
            "x-mine": "ä",
        }
        reply = await bench.post("/v1/chat/completions?api-version=3&x=%2F", body, headers)
        assert reply.status == 201
        assert reply.body == b'{"odd":  [1,2 ]}'
        assert reply.headers["x-odd"] == "yes"
        assert reply.headers["x-request-id"] == "abc"
        assert "server" not in reply.headers
        assert "keep-alive" not in reply.headers
        (asked,) = server.asked
        assert asked.method == "POST"
        assert asked.target == "/v1/chat/completions?api-version=3&x=%2F"
        assert asked.body == body
        assert asked["host"] == f"127.0.0.1:{server.port}"
        assert asked["x-request-id"].startswith("abc.")
        assert asked["traceparent"] == headers["traceparent"]
        assert asked["content-type"] == headers["content-type"]
        assert asked["x-mine"] == "ä"
        for name in ("authorization", "te", "x-hop", "x-forwarded-for", "accept-encoding", "connection"):
            assert name not in asked
        await bench.idle()


async def test_a_prefix_and_keys_of_our_own(tmp_path) -> None:
    one, two = FakeServer(), FakeServer(models=("other",))
    await one.start()
    await two.start()
    keys = tmp_path / "keys"
    keys.write_text(f"# ours\nfor-all\n{two.url}/v1 for-two\n")
    async with running_upstreams(one, two, upstream_api_key_file=str(keys)) as bench:
        await bench.chat(headers={"authorization": "Bearer theirs"})
        await bench.chat(model="other")
        assert one.asked[0]["authorization"] == "Bearer for-all"
        assert two.asked[0]["authorization"] == "Bearer for-two"


@pytest.mark.parametrize(
    ("path", "body"),
    [
        ("/v1/embeddings", {"model": MODEL, "input": ["a", "b"]}),
        ("/v1/rerank", {"model": MODEL, "query": "a", "documents": ["b"]}),
        ("/v1/responses", {"model": MODEL, "input": "a", "instructions": "b"}),
        ("/v1/some/thing/new", {"model": MODEL}),
        ("/v1/completions", {"prompt": "no model is named, and there is one only"}),
    ],
)
async def test_whatever_is_posted_below_v1_goes_on(path: str, body: dict) -> None:
    server = FakeServer()
    async with running_upstreams(server) as bench:
        assert (await bench.post(path, body)).status == 200
        assert server.asked[0].target == path
        assert server.asked[0].json == body


async def test_a_form_goes_to_the_model_that_it_names() -> None:
    one, two = FakeServer(), FakeServer(models=("other",))

    one.answer = two.answer = answers(b'{"text":"a jay"}')
    async with running_upstreams(one, two) as bench:
        form = (
            b'--x\r\nContent-Disposition: form-data; name="file"; filename="a.wav"\r\nContent-Type: audio/wav\r\n\r\n'
            + bytes(100_000)
            + b'\r\n--x\r\nContent-Disposition: form-data; name="model"\r\n\r\nother\r\n--x--\r\n'
        )
        headers = {"content-type": "multipart/form-data; boundary=x"}
        assert (await bench.post("/v1/audio/transcriptions", form, headers)).body == b'{"text":"a jay"}'
        assert bench.asked == [0, 1]
        assert two.asked[0].body == form


@pytest.mark.parametrize(
    "path",
    ["/tokenize", "/v1", "/v1/", "/v2/x", "/v1/../metrics", "/v1/%2e%2e/metrics", "/v1//x", "/v1/load_lora_adapter",
     "/openapi.json", "/shutdown", "/v1/%0d%0ax", "http://elsewhere/v1/completions", "/%76%31/completions",
     "/v1/x%2f..%2f..%2fmetrics", "/v1/unload_lora_adapter"],
)  # fmt: skip
async def test_other_paths_are_not_passed_on(path: str) -> None:
    server = FakeServer()
    async with running_upstreams(server) as bench:
        assert (await bench.post(path, {"model": MODEL})).status == 404
        assert not server.asked


async def test_the_version_is_ours_and_for_everybody(keys: str) -> None:
    server = FakeServer()
    server.told["/version"] = b'{"version":"theirs"}'
    async with running_upstreams(server, api_keys_file=keys) as bench:
        assert (await bench.get("/v1/models")).status == 401
        reply = await bench.get("/version")
        assert (reply.status, reply.json) == (200, VERSION)


@pytest.mark.parametrize(
    ("path", "said"), [("/chat/completions", "It is /v1/chat/completions"), ("/v1/load_lora_adapter", "one server of")]
)
async def test_paths_that_are_not_passed_on_say_why(path: str, said: str) -> None:
    async with running_upstreams(FakeServer()) as bench:
        assert said in (await bench.post(path, {"model": MODEL})).json["error"]["message"]


@pytest.mark.parametrize(
    ("body", "message"),
    [
        (b"{", "not valid JSON"),
        (b"[]", "must be a JSON object"),
        (b'{"model":3}', "model must be a string"),
        (b"\xff", "not valid JSON"),
        (b'{"model":' + b"[" * 5000, "not valid JSON"),
    ],
)
async def test_what_cannot_be_read_is_refused(body: bytes, message: str) -> None:
    server = FakeServer()
    async with running_upstreams(server) as bench:
        reply = await bench.post("/v1/completions", body)
        assert reply.status == 400
        assert message in reply.json["error"]["message"]
        assert not server.asked
        await bench.idle()


async def test_compressed_bodies_go_on_as_they_were() -> None:
    import gzip

    server = FakeServer()
    async with running_upstreams(server) as bench:
        raw = json.dumps({"model": MODEL, "prompt": "a"}).encode()
        reply = await bench.post("/v1/completions", gzip.compress(raw), {"content-encoding": "gzip"})
        assert reply.status == 200
        assert server.asked[0].body == raw
        assert "content-encoding" not in server.asked[0]


async def test_large_bodies_are_read_beside_the_loop() -> None:
    server = FakeServer()
    async with running_upstreams(server) as bench:
        body = {"model": MODEL, "prompt": list(range(200_000)), "max_tokens": 1}
        assert (await bench.post("/v1/completions", body)).status == 200
        assert server.asked[0].json == body


# ---------------------------------------------------------------- answers are forwarded as they arrive


async def test_a_stream_is_passed_on_as_it_comes() -> None:
    go = asyncio.Event()
    said = (b"data: one\n\n", go, b"data: tw", b"o\n\n: a comment\r\n\r\ndata: three\n\n", DONE)
    server = FakeServer(answer=streams(*said, fields="x-trailing: no\r\n", trailers=b"x-late: trailer\r\n"))
    async with running_upstreams(server) as bench, Connection(bench.http) as connection:
        body = json.dumps({"model": MODEL, "stream": True, "messages": []}).encode()
        connection.send("POST", "/v1/chat/completions", body)
        status, headers = await connection.head()
        assert status == 200
        assert headers["content-type"] == "text/event-stream"
        assert headers["x-trailing"] == "no"
        assert await connection.chunk() == b"data: one\n\n"  # while the server is still sending
        go.set()
        rest = b""
        while piece := await connection.chunk():
            assert piece.endswith((b"\n\n", b"\n\r\n"))
            rest += piece
        assert rest == b"data: two\n\n: a comment\r\n\r\ndata: three\n\n" + DONE
        connection.send("POST", "/v1/chat/completions", body)  # and the connection still works
        assert (await connection.reply()).body.startswith(b"data: one\n\n")


@pytest.mark.parametrize("size", [0, 1, 200_000, 300_000, 3_000_000])
@pytest.mark.parametrize("how", ["length", "chunked", "close"])
async def test_whole_answers_of_any_size(size: int, how: str) -> None:
    server, body = FakeServer(), bytes(range(256)) * (size // 256) + b"x" * (size % 256)
    kind = "application/octet-stream"

    async def until_it_closes(asked: Asked, wire: Wire) -> None:
        await wire.raw(f"HTTP/1.1 200 OK\r\ncontent-type: {kind}\r\n\r\n".encode() + body)
        raise ConnectionResetError  # the fake server closes without an error

    chunks = [body[start : start + 70_000] for start in range(0, size, 70_000)]
    server.answer = {
        "length": answers(body, kind=kind),
        "chunked": streams(*chunks, kind=kind),
        "close": until_it_closes,
    }[how]
    async with running_upstreams(server) as bench:
        for _ in range(2):
            reply = await bench.chat()
            assert reply.status == 200
            assert reply.headers["content-type"] == "application/octet-stream"
            assert reply.body == body
        await bench.idle()


async def test_answers_without_a_body_and_with_interim_ones() -> None:
    interim = b"HTTP/1.1 100 Continue\r\n\r\nHTTP/1.1 103 Early Hints\r\nlink: x\r\n\r\n"
    server = FakeServer(answer=says(interim + b"HTTP/1.1 204 None\r\n\r\n"))
    async with running_upstreams(server) as bench, Connection(bench.http) as connection:
        connection.send("POST", "/v1/x", json.dumps({"model": MODEL}).encode())
        status, headers = await connection.head()
        assert status == 204
        assert "content-length" not in headers
        assert "transfer-encoding" not in headers
        assert "link" not in headers


async def test_errors_of_servers_are_passed_on() -> None:
    server = FakeServer()
    async with running_upstreams(server, FakeServer(models=("other",))) as bench:
        for status in (400, 404, 422, 500, 501):
            server.answer = answers(b'{"error":{"message":"too long"}}', status)
            reply = await bench.chat()
            assert (reply.status, reply.body) == (status, b'{"error":{"message":"too long"}}')
        assert bench.asked[0] == 5


async def test_a_slow_client_is_awaited_with_bounded_memory() -> None:
    server = FakeServer()
    written = 0

    async def much(asked: Asked, wire: Wire) -> None:
        nonlocal written
        await wire.begin()
        event = b"data: " + b"x" * 8192 + b"\n\n"
        for _ in range(4500):
            await wire.chunk(event)
            written += len(event)
        await wire.chunk(DONE)
        await wire.end()

    server.answer = much
    async with running_upstreams(server) as bench:
        reader, writer = await asyncio.open_connection(
            *bench.http.rsplit(":", 1), limit=1 << 16
        )  # asyncio stops reading beyond twice this
        body = json.dumps({"model": MODEL, "stream": True, "messages": []}).encode()
        writer.write(
            b"POST /v1/chat/completions HTTP/1.1\r\nhost: lb\r\ncontent-length: %d\r\n\r\n%b" % (len(body), body)
        )
        await reader.readuntil(b"\r\n\r\n")
        pool = bench.lb.fleet.servers[server.url].pool
        await spin(lambda: any(each._answer is not None and each._answer._paused for each in pool._open))
        (held,) = [each._answer._size for each in pool._open if each._answer is not None]
        assert held < HIGH_BYTES + (256 << 10)  # and what one turn of the loop brings
        assert written < 32 << 20
        received = 0
        async with asyncio.timeout(WAIT_S):
            while True:
                data = await reader.read(1 << 20)
                received += len(data)
                if data.endswith(b"0\r\n\r\n"):
                    break
        assert received > 32 << 20
        writer.close()
        await bench.idle()


@pytest.mark.parametrize("stream", [False, True])
async def test_a_client_that_leaves_ends_its_request_at_the_server(stream: bool) -> None:
    server = FakeServer()

    server.answer = streams(b"data: x\n\n", STALL) if stream else never
    async with running_upstreams(server) as bench:
        async with Connection(bench.http) as connection:
            body = json.dumps({"model": MODEL, "stream": stream, "messages": []}).encode()
            connection.send("POST", "/v1/chat/completions", body)
            await spin(lambda: server.open == 1)
            connection.drop()
            await spin(lambda: server.left == 1)
        await bench.idle()
        assert bench.gauge("requests_total", finish="cancelled", model=MODEL) == 1


async def test_connections_to_servers_are_kept() -> None:
    server = FakeServer()
    async with running_upstreams(server) as bench:
        pool = bench.lb.fleet.servers[server.url].pool
        for _ in range(20):
            assert (await bench.chat(stream=True)).status == 200
            assert (await bench.chat()).status == 200
        assert (pool.open, pool.made) == (1, 1)
        await asyncio.gather(*[bench.chat() for _ in range(4)])
        assert pool.made <= 4


# ---------------------------------------------------------------- models


async def test_a_server_may_list_any_context_length() -> None:
    one, other = FakeServer(models=("a",)), FakeServer(models=("a",))
    one.lists = b'{"data":[{"id":"a","max_model_len":1%b}]}' % (b"0" * 400)
    other.lists = b'{"data":[{"id":"a","max_model_len":100}]}'
    async with running_upstreams(one, other) as bench:
        (listed,) = (await bench.get("/v1/models")).json["data"]
        assert listed["max_model_len"] == 100


@pytest.mark.parametrize("number", [b"NaN", b"1e999", b"-Infinity"])
async def test_what_is_no_json_is_not_passed_on_in_a_list(number: bytes) -> None:
    server = FakeServer(models=("a",))
    server.lists = b'{"data":[{"id":"a","x":%b},{"id":"b","max_model_len":7}]}' % number
    async with running_upstreams(server) as bench:
        body = (await bench.get("/v1/models")).body
        assert not re.search(rb"NaN|Infinity", body)
        assert [each["id"] for each in json.loads(body)["data"]] == ["a", "b"]


async def test_models_are_those_of_all_servers() -> None:
    both, one = FakeServer(models=("a", "b")), FakeServer(models=("b", "c"))
    one.lists = b'{"data":[{"id":"b","max_model_len":100,"x":1},{"id":"c"},{"id":7},{"id":""}]}'
    async with running_upstreams(both, one) as bench:
        listed = (await bench.get("/v1/models")).json
        assert {each["id"]: each.get("max_model_len") for each in listed["data"]} == {"a": 4096, "b": 100, "c": None}
        assert (await bench.get("/v1/models/b")).json["x"] == 1
        assert (await bench.get("/v1/models/z")).status == 404
        for model, counts in (("a", [1, 0]), ("c", [1, 1])):
            assert (await bench.chat(model=model)).status == 200
            assert bench.asked == counts
        reply = await bench.chat(model="d")
        assert reply.status == 404
        assert reply.json["error"]["code"] == "model_not_found"
        assert "a, b, c" in reply.json["error"]["message"]
        assert (await bench.post("/v1/completions", {"prompt": "x"})).status == 400  # no model is named


async def test_models_come_and_go() -> None:
    server = FakeServer(models=("a",))
    async with running_upstreams(server) as bench:
        await server.stop()
        await bench.until(lambda: bench.live(model="a"))
        server.models = ("b",)
        await server.start()
        await bench.until(lambda: bench.live(server, model="b"))
        assert (await bench.chat(model="b")).status == 200
        assert (await bench.chat(model="a")).status == 404


async def test_who_waits_for_a_model_that_goes_is_told() -> None:
    server = FakeServer(models=("a", "b"))
    async with running_upstreams(server) as bench:
        await bench.fill(server)
        waits = asyncio.ensure_future(bench.chat(model="b"))
        await spin(lambda: bench.gauge("queue_requests") == 1)
        known = bench.lb.fleet.servers[server.url]
        bench.lb.fleet.listed(known, {"a": {}})
        assert (await waits).status == 503
        assert (await bench.chat(model="b")).status == 404
        await bench.idle()


async def test_clients_are_told_to_retry_before_a_model_is_known() -> None:
    server = FakeServer()
    server.lists = b"{}"
    async with running_upstreams(server, known=False) as bench:
        reply = await bench.chat()
        assert reply.status == 503
        assert reply.headers["retry-after"] == "1"
        ready = await bench.get("/health/ready")
        assert ready.status == 503
        assert str(server.port) not in ready.body.decode()
        server.lists = None
        await bench.until(lambda: bench.live(server))
        assert (await bench.get("/health/ready")).status == 200


@pytest.mark.parametrize(
    "lists", [b"", b"[]", b"{}", b'{"data":3}', b'{"data":[{}]}', b"[" * 100_000, b"\xff", b'{"data":[]}']
)
async def test_malformed_lists_of_models(lists: bytes) -> None:
    server, sound = FakeServer(), FakeServer()
    server.lists = lists
    async with running_upstreams(server, sound, known=False) as bench:
        await bench.until(lambda: bench.live(sound))
        assert (await bench.chat()).status == 200
        assert bench.asked == [0, 1]


# ---------------------------------------------------------------- where requests go


async def test_prompts_that_begin_alike_go_to_one_server() -> None:
    servers = [FakeServer() for _ in range(4)]
    for server in servers:
        server.running = 0
    async with running_upstreams(*servers, upstream_capacity=64) as bench:
        for round_ in range(6):
            for group in range(4):
                text = f"group {group} " * 200 + f"and {round_} alone"
                assert (await bench.chat(text)).status == 200
        found = [{asked.json["messages"][0]["content"][:7] for asked in server.asked} for server in servers]
        assert sum(map(len, found)) == 4  # no group is at two servers


async def test_sessions_stay_where_they_are_by_their_header() -> None:
    servers = [FakeServer() for _ in range(4)]
    async with running_upstreams(*servers, routing="consistent_hash", upstream_capacity=64) as bench:
        for session in range(12):
            for turn in range(3):
                await bench.chat(f"turn {turn}", {"x-pinyon-session": f"s{session}"}, session=session)
        found = [{asked.json["session"] for asked in server.asked} for server in servers]
        assert sum(map(len, found)) == 12
        assert sum(map(bool, found)) > 1


async def test_nothing_is_pushed_to_a_server_where_requests_wait() -> None:
    busy, idle = FakeServer(), FakeServer()
    async with running_upstreams(busy, idle) as bench:
        await bench.fill(busy)
        for _ in range(6):
            assert (await bench.chat()).status == 200
        assert bench.asked == [0, 6]
        # All servers have waiting requests, so requests wait here, and go on in order of arrival.
        await bench.fill(idle)
        tasks = []
        for number in range(3):
            tasks.append(asyncio.ensure_future(bench.chat(number=number)))
            await spin(lambda: bench.gauge("queue_requests") == len(tasks))
        assert bench.asked == [0, 6]
        busy.waiting = 0
        assert [reply.status for reply in await asyncio.gather(*tasks)] == [200] * 3
        assert [asked.json["number"] for asked in busy.asked] == [0, 1, 2]
        await bench.idle()


async def test_a_burst_does_not_overshoot_between_two_reports() -> None:
    go = asyncio.Event()
    server = FakeServer(answer=after(go, answers()))
    async with running_upstreams(server, upstream_capacity=3, upstream_probe_s=1.0) as bench:
        tasks = [asyncio.ensure_future(bench.chat()) for _ in range(10)]
        await spin(lambda: bench.gauge("queue_requests") == 7)
        await bench.until(lambda: bench.lb.fleet.servers[server.url].report.running == 3)
        assert server.open == 3
        go.set()
        assert {reply.status for reply in await asyncio.gather(*tasks)} == {200}
        await bench.idle()


@pytest.mark.parametrize(("capacity", "sharers"), [(2, 1), (5, 3)])
async def test_servers_without_metrics_are_counted_by_what_they_have(capacity: int, sharers: int) -> None:
    servers, go = [FakeServer(metrics=False), FakeServer(metrics=False)], asyncio.Event()

    for server in servers:
        server.answer = after(go, answers())
    async with running_upstreams(*servers, upstream_capacity=capacity, upstream_sharers=sharers) as bench:
        tasks = [asyncio.ensure_future(bench.chat()) for _ in range(6)]
        await spin(lambda: bench.gauge("queue_requests") == 2 and sum(bench.asked) == 4)
        assert bench.asked == [2, 2]
        go.set()
        assert {reply.status for reply in await asyncio.gather(*tasks)} == {200}


async def test_room_at_a_server_is_shared_with_other_load_balancers() -> None:
    """Load balancers share the free room of a server that reports its running requests, but not its batch size."""
    says, silent = FakeServer(), FakeServer(metrics=False)
    says.running = 6
    async with running_upstreams(says, silent, upstream_capacity=20, upstream_sharers=4) as bench:
        known = [bench.lb.fleet.servers[server.url] for server in (says, silent)]
        await bench.until(lambda: known[0].report.room == 4)
        assert [server.room_for for server in known] == [20, 5]
    async with running_upstreams(silent, upstream_sharers=3) as bench:
        assert bench.lb.fleet.servers[silent.url].room_for == 11  # of the 32 that are assumed


@pytest.mark.parametrize("kind", [each for each in SERVER_KINDS if each.paths], ids=lambda kind: kind.name)
async def test_a_capacity_is_found_at_any_path_that_tells_it(kind: ServerKind) -> None:
    server = FakeServer()
    server.kind, told = kind, 48  # its JSON, from the inside
    for step in reversed(kind.members[-1]):
        told = [told] if step == 0 else {step: told}
    server.told = {path.decode(): b'{"other": 1}' for path in kind.paths[:-1]}
    server.told[kind.paths[-1].decode()] = json.dumps(told).encode()
    async with running_upstreams(server) as bench:
        await bench.until(lambda: bench.lb.fleet.servers[server.url].told_capacity == 48)


async def test_routing_and_pushing_change_while_it_runs() -> None:
    servers = [FakeServer(), FakeServer()]
    async with running_upstreams(*servers, routing="consistent_hash") as bench:
        models = bench.lb.models
        for _ in range(4):
            await bench.chat(user="one")
        assert sorted(bench.asked) == [0, 4]
        models.use(routing="round_robin")
        for _ in range(4):
            await bench.chat(user="one")
        assert sorted(bench.asked) == [2, 6]
        for server in servers:
            server.waiting = 1
        await bench.until(lambda: all(each.report.pending == 1 for each in bench.lb.fleet.servers.values()))
        waits = asyncio.ensure_future(bench.chat())
        await spin(lambda: bench.gauge("queue_requests") == 1)
        models.use(pushing="blind")
        assert (await waits).status == 200


# ---------------------------------------------------------------- admission


async def test_keys_rates_and_usage(tmp_path) -> None:
    keys = tmp_path / "keys"
    keys.write_text("sk-1 anna tpm=1000\nsk-2 bert rpm=2\n")
    server = FakeServer()
    async with running_upstreams(server, api_keys_file=str(keys)) as bench:
        assert (await bench.chat()).status == 401
        assert (await bench.get("/v1/models")).status == 401
        anna, bert = ({"authorization": f"Bearer sk-{number}"} for number in (1, 2))
        first = await bench.chat("x" * 400, anna, max_tokens=800)
        assert first.status == 200
        # The server reports 7 tokens used; the rest is given back.
        second = await bench.chat("x" * 400, anna, max_tokens=800)
        assert second.status == 200
        assert (await bench.chat("x" * 400, anna, max_tokens=1000)).status == 429
        assert [(await bench.chat("x", bert)).status for _ in range(3)] == [200, 200, 429]
        assert bench.gauge("prompt_tokens_total", model=MODEL) == 20
        assert bench.gauge("cached_tokens_total", model=MODEL) == 16


async def test_a_full_queue_refuses() -> None:
    go = asyncio.Event()
    server = FakeServer(answer=after(go, answers()))
    async with running_upstreams(server, upstream_capacity=1, queue_limit=1, in_flight_limit=1) as bench:
        tasks = [asyncio.ensure_future(bench.chat()) for _ in range(2)]
        await spin(lambda: bench.gauge("queue_requests") == 1)
        refused = await bench.chat()
        assert refused.status == 429
        assert "retry-after" in refused.headers
        go.set()
        assert {reply.status for reply in await asyncio.gather(*tasks)} == {200}


async def test_draining_lets_what_runs_finish() -> None:
    go = asyncio.Event()
    server = FakeServer(answer=streams(b"data: 1\n\n", go, DONE))
    async with running_upstreams(server) as bench:
        running = asyncio.ensure_future(bench.chat(stream=True))
        await spin(lambda: server.open == 1)
        closing = asyncio.ensure_future(bench.lb.close(WAIT_S))
        await spin(lambda: bench.lb.readiness.draining)
        go.set()
        assert (await running).body == b"data: 1\n\n" + DONE
        await closing


async def test_cors_and_the_pages() -> None:
    fields = "access-control-allow-origin: *\r\nx-ratelimit-limit-requests: 7\r\n"
    server = FakeServer(answer=answers(fields=fields))
    async with running_upstreams(server, cors_origins="https://a.example") as bench:
        reply = await bench.chat(headers={"origin": "https://a.example"})
        assert reply.headers["access-control-allow-origin"] == "https://a.example"
        assert reply.headers["x-ratelimit-limit-requests"] == "7"
        assert (await bench.get("/health/ready")).json == {"status": "ready"}
        assert b"pinyon_lb_upstream_live" in (await bench.get("/metrics")).body
        assert (await bench.get("/v1/completions")).status == 405


# ---------------------------------------------------------------- load balancers in front of load balancers


async def test_a_load_balancer_in_front_of_load_balancers() -> None:
    servers = [FakeServer() for _ in range(4)]
    async with running_upstreams(*servers[:2]) as left, running_upstreams(*servers[2:]) as right:
        behind = [f"http://{each.http}" for each in (left, right)]
        async with running_upstreams(known=False, upstream=",".join(behind)) as front:
            await front.known()
            await front.until(
                lambda: all(
                    each.kind is not None and each.kind.name == "pinyon" for each in front.lb.fleet.servers.values()
                )
            )
            reply = await front.chat(stream=True, headers={"x-request-id": "seen"})
            assert reply.status == 200
            assert reply.body.endswith(DONE)
            replies = await asyncio.gather(*[front.chat(f"{number} " * 300) for number in range(20)])
            assert {each.status for each in replies} == {200}
            assert sum(len(server.asked) for server in servers) == 21
            assert any(asked["x-request-id"].startswith("seen.") for server in servers for asked in server.asked)
            left.lb.readiness.draining = True
            await front.until(lambda: not front.lb.fleet.servers[behind[0]].healthy)
            before = [len(server.asked) for server in servers[:2]]
            assert (await front.chat()).status == 200
            assert [len(server.asked) for server in servers[:2]] == before
            await front.idle()


async def test_policies_are_changed_by_admins() -> None:
    server = FakeServer()
    async with running_upstreams(server) as bench, grpc.aio.insecure_channel(bench.endpoints["grpc"]) as channel:
        stub = admin_pb2_grpc.AdminServiceStub(channel)

        async def apply(**settings: str) -> dict[str, str]:
            wanted = [admin_pb2.Setting(name=name, value=value) for name, value in settings.items()]
            changes = (await stub.Apply(admin_pb2.ApplyRequest(settings=wanted))).changes
            return {change.name: change.after for change in changes}

        assert await apply() == {"draining": "false", "pushing": "pending", "routing": "skywalker"}
        changed = await apply(routing="skywalker:explore_below=0.2", pushing="outstanding:limit=3")
        assert changed == {
            "draining": "false",
            "pushing": "outstanding:limit=3",
            "routing": "skywalker:explore_below=0.2",
        }
        assert bench.lb.fleet.models[MODEL].layers.local._pushing.name == "outstanding"
        with pytest.raises(grpc.aio.AioRpcError, match="no routing policy"):
            await apply(routing="x")
        assert (await bench.chat()).status == 200


async def test_geographies_are_checked_only_where_a_region_is_set() -> None:
    server = FakeServer()
    headers = {"x-pinyon-geographies": "eu"}
    async with running_upstreams(server) as bench:
        assert (await bench.chat(headers=headers)).status == 200
    async with running_upstreams(server, region="us") as bench:
        reply = await bench.chat(headers=headers)
        assert reply.status == 400
        assert reply.json["error"]["param"] == "geographies"
        assert (await bench.chat(headers={"x-pinyon-geographies": "eu, us"})).status == 200
