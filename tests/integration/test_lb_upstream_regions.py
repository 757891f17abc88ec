"""Requests for other makers' servers that go to another region, and come back unchanged."""

from __future__ import annotations

import asyncio
import json

import pytest

from pinyon.api.lb.v1 import peer_pb2
from pinyon.frontdoor.answer import HIGH_BYTES
from pinyon.routing.target import Report
from tests.integration.lb_harness import WAIT_S, Connection, spin
from tests.integration.regions_harness import peer_of
from tests.integration.upstream_caller import Caller
from tests.integration.upstream_parts import DONE, MODEL, Asked, FakeServer, Wire, answers, streams
from tests.integration.upstream_regions_parts import STREAM, running_upstream_regions


async def test_a_request_without_room_goes_unchanged_to_another_region():
    async with running_upstream_regions("us", "eu") as regions:
        us, eu = regions["us"], regions["eu"]
        assert (await us.chat()).status == 200
        assert regions.asked() == {"us": 1, "eu": 0}
        await regions.full("us")

        eu.servers[0].answer = answers(b'{"odd":  [1,2 ]}', 201, "x-odd: yes\r\nx-ratelimit-limit-requests: 7\r\n")
        body = b'{ "unknown":{"deep":[1, 2.50,null]},\n"model": "model-a", "messages":[], "temperature":1e-3 }'
        headers = {"authorization": "Bearer mine", "x-request-id": "abc", "x-mine": "ä", "te": "trailers",
                   "content-type": "application/json; charset=utf-8", "x-pinyon-session": "one",
                   "traceparent": "00-0af7651916cd43dd8448eb211c80319c-b7ad6b7169203331-01"}  # fmt: skip
        reply = await us.post("/v1/chat/completions?api-version=3&x=%2F", body, headers)
        assert (reply.status, reply.body) == (201, b'{"odd":  [1,2 ]}')
        assert reply.headers["x-odd"] == "yes"
        assert reply.headers["x-ratelimit-limit-requests"] == "7"
        assert reply.headers["x-request-id"] == "abc"
        (there,) = eu.servers[0].asked
        assert there.target == "/v1/chat/completions?api-version=3&x=%2F"
        assert there.body == body
        assert there["x-mine"] == "ä"
        assert there["host"] == f"127.0.0.1:{eu.servers[0].port}"
        assert there["x-request-id"].startswith("abc.")
        assert there["traceparent"] == headers["traceparent"]
        assert there["content-type"] == headers["content-type"]
        assert "authorization" not in there
        assert "te" not in there
        assert us.gauge("forwarded_total", region="eu") == 1
        assert eu.gauge("accepted_total", region="us") == 1
        await regions.idle()


async def test_a_stream_crosses_as_it_comes_byte_by_byte():
    async with running_upstream_regions("us", "eu") as regions:
        await regions.full("us")
        go = asyncio.Event()

        rest_of_it = (b"data: tw", b"o\n\n: a comment\r\n\r\ndata: three\n\n", DONE)
        regions["eu"].servers[0].answer = streams(b"data: one\n\n", go, *rest_of_it, fields="x-odd: no\r\n")
        async with Connection(regions["us"].http) as connection:
            for _ in range(2):
                connection.send("POST", "/v1/chat/completions", STREAM)
                status, headers = await connection.head()
                assert status == 200
                assert headers["content-type"] == "text/event-stream"
                assert headers["x-odd"] == "no"
                assert await connection.chunk() == b"data: one\n\n"  # while the server is still sending
                go.set()
                rest = b""
                while piece := await connection.chunk():
                    rest += piece
                go.clear()  # the connection still works
                assert rest == b"data: two\n\n: a comment\r\n\r\ndata: three\n\n" + DONE
        await regions.idle()


@pytest.mark.parametrize("size", [0, 1, 200_000, 300_000, 3_000_000])
@pytest.mark.parametrize("delay_ms", [0, 5])
async def test_bodies_of_any_size_both_ways(size: int, delay_ms: int):
    async with running_upstream_regions(
        "us", "eu", test_region_delays_ms=f"eu={delay_ms}", body_limit_bytes=8 << 20
    ) as regions:
        await regions.full("us")
        back = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

        regions["eu"].servers[0].answer = answers(back, kind="application/octet-stream")
        body = json.dumps({"model": MODEL, "prompt": "ab" * (size // 2)}).encode()
        reply = await regions["us"].post("/v1/completions", body)
        assert reply.status == 200
        assert reply.body == back
        assert regions["eu"].servers[0].asked[0].body == body
        await regions.idle()


async def test_a_body_too_large_for_the_other_region_waits_at_home():
    async with running_upstream_regions("us", "eu") as regions:
        await regions.full("us")
        regions["eu"].lb.serving.limits = regions["eu"].lb.serving.limits.__class__(body_bytes=1024)
        large = asyncio.ensure_future(regions["us"].post("/v1/completions", {"model": MODEL, "prompt": "x" * 4096}))
        await spin(lambda: regions["us"].gauge("forwarded_total", region="eu") == 1)
        await spin(lambda: regions["us"].gauge("queue_requests") == 1)
        assert (await regions["us"].chat()).status == 200  # that request is taken there
        assert regions.asked() == {"us": 0, "eu": 1}
        await regions.full("us", full=False)
        assert (await large).status == 200
        assert regions.asked() == {"us": 1, "eu": 1}
        assert regions["us"].gauge("forwarded_total", region="eu") == 2
        await regions.idle()


async def test_models_that_only_another_region_has():
    async with running_upstream_regions("us", "eu", linked=False, upstream_health_s=0.05) as regions:
        us, eu = regions["us"], regions["eu"]
        other = FakeServer(models=("only-eu",))
        await other.start()
        eu.lb.fleet.listed(eu.lb.fleet.servers[eu.servers[0].url], {MODEL: {"id": MODEL}, "only-eu": {"id": "only-eu"}})
        us.lb.regions.know([peer_of("eu", eu)])
        await regions.knows("us", "eu", room=True, model="only-eu")
        assert (await us.chat(model="only-eu")).status == 200
        assert regions.asked() == {"us": 0, "eu": 1}
        listed = {each["id"] for each in (await us.get("/v1/models")).json["data"]}
        assert listed == {MODEL, "only-eu"}
        eu.lb.fleet.listed(eu.lb.fleet.servers[eu.servers[0].url], {MODEL: {"id": MODEL}})
        await us.until(lambda: "only-eu" not in us.lb.models.by_name)
        assert (await us.chat(model="only-eu")).status == 404
        await regions.idle()
        await other.stop()


async def test_models_of_other_regions_do_not_change_the_default_model():
    async with running_upstream_regions("us", "eu", linked=False) as regions:
        us, eu = regions["us"], regions["eu"]
        eu.lb.fleet.listed(eu.lb.fleet.servers[eu.servers[0].url], {MODEL: {"id": MODEL}, "other": {"id": "other"}})
        us.lb.regions.know([peer_of("eu", eu)])
        await regions.knows("us", "eu", room=True, model="other")
        assert (await us.post("/v1/completions", {"prompt": "x"})).status == 200


async def test_requests_under_way_are_counted_for_each_model():
    async with running_upstream_regions("us", "eu", linked=False) as regions:
        us, eu = regions["us"], regions["eu"]
        eu.servers[0].models = (MODEL, "other")
        eu.lb.fleet.listed(eu.lb.fleet.servers[eu.servers[0].url], {MODEL: {"id": MODEL}, "other": {"id": "other"}})
        us.lb.regions.know([peer_of("eu", eu)])
        await regions.knows("us", "eu", room=True, model="other")
        heard = us.lb.models
        (link,) = us.lb.regions.links
        layers = {model: us.lb.models.by_name[model].layers.remote for model in (MODEL, "other")}
        for model in ("other", MODEL, "other"):
            heard._under_way.sent("lb-eu", model)
        for layer in layers.values():
            layer.get("lb-eu").sent = layer.get("lb-eu").outstanding = 2
        for received, expected in ((0, (1, 2)), (1, (1, 1)), (2, (0, 1)), (3, (0, 0))):
            reports = dict.fromkeys(layers, Report(0, 0, 4, received, 1))
            heard.heard("lb-eu", "eu", reports, link.distance_s, draining=False)
            assert tuple(layer.get("lb-eu").unseen for layer in layers.values()) == expected
        for layer in layers.values():
            layer.get("lb-eu").outstanding = 0


# -- pace: an answer is read no faster than the client takes it


async def much(asked: Asked, wire: Wire) -> None:
    await wire.begin()
    event = b"data: " + b"x" * 8192 + b"\n\n"
    for _ in range(4500):
        await wire.chunk(event)
    await wire.chunk(DONE)
    await wire.end()


async def test_who_takes_nothing_makes_the_server_wait():
    async with running_upstream_regions("us") as regions, Caller(regions["us"]) as caller:
        server = regions["us"].servers[0]
        server.answer = much
        await caller.ask(caller.request())
        pool = regions["us"].lb.fleet.servers[server.url].pool
        await spin(lambda: any(each._answer is not None and each._answer._paused for each in pool._open))
        size = 0
        async with asyncio.timeout(WAIT_S):
            while size < HIGH_BYTES:
                size += sum(len(piece.data) for piece in (await caller.call.read()).raw_pieces)
        assert size < 3 * HIGH_BYTES
        (session,) = regions["us"].lb.serving.sessions
        assert not session._outgoing.messages
        news, taken = size, 0
        while size < 4500 * 8200 + len(DONE):
            if news:
                await caller.call.write(peer_pb2.SessionRequest(raw_taken=[peer_pb2.RawTaken(stream_id=1, bytes=news)]))
                taken += news
            async with asyncio.timeout(WAIT_S):
                news = sum(len(piece.data) for piece in (await caller.call.read()).raw_pieces)
            size += news
            assert size - taken < 3 * HIGH_BYTES
        await regions.idle()


async def test_a_slow_client_is_waited_for_on_every_hop():
    async with running_upstream_regions("us", "eu") as regions:
        us, eu = regions["us"], regions["eu"]
        await regions.full("us")
        eu.servers[0].answer = much
        reader, writer = await asyncio.open_connection(*us.http.rsplit(":", 1), limit=1 << 16)
        head = b"POST /v1/chat/completions HTTP/1.1\r\nhost: lb\r\ncontent-length: %d\r\n\r\n%b"
        writer.write(head % (len(STREAM), STREAM))
        await reader.readuntil(b"\r\n\r\n")
        pool = eu.lb.fleet.servers[eu.servers[0].url].pool
        await spin(lambda: any(each._answer is not None and each._answer._paused for each in pool._open))
        (link,) = us.lb.regions.links
        (stream,) = link.talk.raw.streams.values()
        assert stream.answer._size < 3 * HIGH_BYTES
        received = 0
        async with asyncio.timeout(WAIT_S):
            while received < 4500 * 8200:
                data = await reader.read(1 << 20)
                assert data
                received += len(data)
                if data.endswith(b"0\r\n\r\n"):
                    break
        writer.close()
        await regions.idle()
