"""Requests for other makers' servers in another region that end early: clients leave, servers die, answers break."""

from __future__ import annotations

import asyncio
import json

from pinyon.frontdoor.upstreams.forwarding import Forwarding
from tests.integration.lb_harness import WAIT_S, Connection, spin
from tests.integration.regions_harness import peer_of
from tests.integration.upstream_parts import DONE, DROP, STALL, answers, generate, never, streams
from tests.integration.upstream_regions_parts import STREAM, running_upstream_regions
from tests.on_compiled import REPLACES_METHODS


async def test_a_client_that_leaves_is_gone_on_every_hop():
    async with running_upstream_regions("us", "eu") as regions:
        await regions.full("us")
        server = regions["eu"].servers[0]
        server.answer = never
        async with Connection(regions["us"].http) as connection:
            connection.send("POST", "/v1/chat/completions", STREAM)
            await spin(lambda: server.open == 1)
            connection.drop()
            await spin(lambda: server.left == 1)
        await regions.idle()


@REPLACES_METHODS
async def test_a_deadline_crosses_regions(monkeypatch):
    async with running_upstream_regions("us", "eu", linked=False) as regions:
        us, eu = regions["us"], regions["eu"]
        us.lb.regions.know([peer_of("eu", eu)])
        await regions.knows("us", "eu", room=True)
        await regions.full("us")
        us.lb.serving.forwarding.request_s = 3.0
        server = eu.servers[0]

        server.answer = never
        heads = []
        serve = Forwarding.serve_forwarded

        async def seen(self, head, body, reply, incoming):
            if incoming.sender:
                heads.append(incoming)
            return await serve(self, head, body, reply, incoming)

        monkeypatch.setattr(Forwarding, "serve_forwarded", seen)
        reply = await us.chat()
        assert reply.status == 504
        assert 0 < heads[0].limit_s <= 3.0
        assert heads[0].sender == "us"
        await spin(lambda: server.left == 1)
        await regions.idle()


async def test_a_region_that_dies_before_the_first_byte_is_replaced():
    async with running_upstream_regions("us", "eu", "ap") as regions:
        us, eu, ap = (regions[name] for name in ("us", "eu", "ap"))
        await regions.full("us")
        await regions.full("ap")
        await regions.knows("us", "ap", room=False)
        eu.servers[0].answer = never
        asking = asyncio.ensure_future(us.chat())
        await spin(lambda: eu.servers[0].open == 1)
        await regions.full("ap", full=False)
        await regions.knows("us", "ap", room=True)
        await eu.lb.grpc.drain(0)
        assert (await asking).status == 200
        assert regions.asked() == {"us": 0, "eu": 1, "ap": 1}
        await us.idle()
        await ap.idle()


async def test_a_region_that_dies_in_mid_stream_is_an_error_event():
    async with running_upstream_regions("us", "eu") as regions:
        await regions.full("us")

        regions["eu"].servers[0].answer = streams(b'data: {"n":1}\n\n', STALL)
        async with Connection(regions["us"].http) as connection:
            connection.send("POST", "/v1/chat/completions", STREAM)
            assert (await connection.head())[0] == 200
            first = await connection.chunk()
            await regions["eu"].lb.grpc.drain(0)
            rest = b""
            while piece := await connection.chunk():
                rest += piece
        assert first == b'data: {"n":1}\n\n'
        event, done = rest[: -len(DONE)], rest[-len(DONE) :]
        assert done == DONE
        assert json.loads(event.removeprefix(b"data: "))["error"]["code"] == "bad_gateway"
        assert regions.asked() == {"us": 0, "eu": 1}
        await regions["us"].idle()


async def test_a_broken_stream_of_another_region_is_one_error_event():
    async with running_upstream_regions("us", "eu") as regions:
        await regions.full("us")

        regions["eu"].servers[0].answer = streams(b'data: {"n":1}\n\ndata: {"n":', DROP)
        reply = await regions["us"].post("/v1/chat/completions", STREAM)
        assert reply.body.startswith(b'data: {"n":1}\n\ndata: {"error"')
        assert reply.body.count(b"bad_gateway") == 1
        assert reply.body.count(DONE) == 1
        await regions.idle()


async def test_a_refusal_is_retried_elsewhere_and_then_passed_on():
    async with running_upstream_regions("us", "eu", "ap", attempts=2) as regions:
        await regions.full("us")

        for name in ("eu", "ap"):
            regions[name].servers[0].answer = answers(b'{"error":"busy"}', 429, "retry-after: 7\r\n")
        reply = await regions["us"].chat()
        assert (reply.status, reply.body) == (429, b'{"error":"busy"}')
        assert reply.headers["retry-after"] == "7"
        assert regions.asked() == {"us": 0, "eu": 1, "ap": 1}
        await regions.idle()


async def test_a_region_that_ends_in_good_order_ends_what_it_has():
    async with running_upstream_regions("us", "eu") as regions:
        us, eu = regions["us"], regions["eu"]
        await regions.full("us")
        go = asyncio.Event()

        eu.servers[0].answer = streams(b"data: one\n\n", go, b"data: two\n\n" + DONE)
        async with Connection(us.http) as connection:
            connection.send("POST", "/v1/chat/completions", STREAM)
            assert (await connection.head())[0] == 200
            assert await connection.chunk() == b"data: one\n\n"
            ending = asyncio.ensure_future(eu.lb.close(WAIT_S))
            await us.until(lambda: any(each.draining for each in us.remote()))
            waiting = asyncio.ensure_future(us.chat())
            await spin(lambda: us.gauge("queue_requests") == 1)
            go.set()
            rest = b""
            while piece := await connection.chunk():
                rest += piece
            assert rest == b"data: two\n\n" + DONE
        await ending
        await regions.full("us", full=False)
        assert (await waiting).status == 200
        await us.idle()


async def test_requests_of_a_dying_region_go_before_later_ones():
    async with running_upstream_regions("us", "eu", placement_wait_s=600.0) as regions:
        us, eu = regions["us"], regions["eu"]
        await regions.full("us")

        eu.servers[0].answer = never
        victims = [asyncio.ensure_future(us.chat(text="victim")) for _ in range(3)]
        await spin(lambda: eu.servers[0].open == 3)
        await regions.full("eu")
        await regions.knows("us", "eu", room=False)
        later = [asyncio.ensure_future(us.chat(text="later")) for _ in range(6)]
        await spin(lambda: us.gauge("queue_requests") == 6)
        await eu.lb.grpc.drain(0)
        await spin(lambda: us.gauge("queue_requests") == 9)
        served: list[str] = []

        async def one(asked, wire):
            served.append(asked.json["messages"][0]["content"])
            await generate(asked, wire)

        us.servers[0].answer = one
        us.lb.models.use(pushing="outstanding:limit=1")
        us.servers[0].waiting = 0
        assert {(await each).status for each in (*victims, *later)} == {200}
        assert served[:3] == ["victim"] * 3
