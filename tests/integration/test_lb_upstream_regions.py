"""Requests for other people's servers that go to another region: what the client sees, and what is never done."""

from __future__ import annotations

import asyncio
import contextlib
import json
from hashlib import sha256

import grpc
import pytest

from pinyon.api.lb.v1 import peer_pb2, peer_pb2_grpc
from pinyon.routing.geography import parse_geography
from pinyon.routing.target import Report
from services.lb.regions.peer import Peer
from services.lb.regions.proof import caller_proof, raw_proof
from services.lb.upstreams.answer import HIGH_BYTES
from tests.integration.controller_parts import running_controller
from tests.integration.lb_harness import WAIT_S, Connection, running_lb, spin
from tests.integration.upstream_parts import (
    DONE,
    MODEL,
    Asked,
    FakeServer,
    Wire,
    generate,
    peer_of,
    running_upstream_regions,
)
from tests.on_compiled import REPLACES_METHODS

SECRET = b"a secret of the federation"
STREAM = json.dumps({"model": MODEL, "stream": True, "messages": []}).encode()


def asked(regions) -> dict[str, int]:
    return {name: len(bench.servers[0].asked) for name, bench in regions.items()}


# ---------------------------------------------------------------- there and back


async def test_what_the_region_has_no_room_for_goes_to_another_one_as_it_came(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu") as regions:
        us, eu = regions["us"], regions["eu"]
        assert (await us.chat()).status == 200
        assert asked(regions) == {"us": 1, "eu": 0}
        await regions.full("us")

        async def odd(asked: Asked, wire: Wire) -> None:
            await wire.whole(b'{"odd":  [1,2 ]}', 201, "x-odd: yes\r\nx-ratelimit-limit-requests: 7\r\n")

        eu.servers[0].answer = odd
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


async def test_a_stream_crosses_as_it_comes_byte_by_byte(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu") as regions:
        await regions.full("us")
        go = asyncio.Event()

        async def slow(asked: Asked, wire: Wire) -> None:
            await wire.begin("x-odd: no\r\n")
            await wire.chunk(b"data: one\n\n")
            await go.wait()
            await wire.chunk(b"data: tw")
            await wire.chunk(b"o\n\n: a comment\r\n\r\ndata: three\n\n")
            await wire.chunk(DONE)
            await wire.end()

        regions["eu"].servers[0].answer = slow
        async with Connection(regions["us"].http) as connection:
            for _ in range(2):
                connection.send("POST", "/v1/chat/completions", STREAM)
                status, headers = await connection.head()
                assert status == 200
                assert headers["content-type"] == "text/event-stream"
                assert headers["x-odd"] == "no"
                assert await connection.chunk() == b"data: one\n\n"  # while the server is not done
                go.set()
                rest = b""
                while piece := await connection.chunk():
                    rest += piece
                go.clear()  # the connection is as good as before
                assert rest == b"data: two\n\n: a comment\r\n\r\ndata: three\n\n" + DONE
        await regions.idle()


@pytest.mark.parametrize("size", [0, 1, 200_000, 300_000, 3_000_000])
@pytest.mark.parametrize("delay_ms", [0, 5])
async def test_bodies_of_any_size_both_ways(size: int, delay_ms: int, tmp_path):
    async with running_upstream_regions(
        tmp_path, "us", "eu", test_region_delays_ms=f"eu={delay_ms}", body_limit_bytes=8 << 20
    ) as regions:
        await regions.full("us")
        back = bytes(range(256)) * (size // 256) + b"x" * (size % 256)

        async def echo(asked: Asked, wire: Wire) -> None:
            await wire.whole(back, kind="application/octet-stream")

        regions["eu"].servers[0].answer = echo
        body = json.dumps({"model": MODEL, "prompt": "ab" * (size // 2)}).encode()
        reply = await regions["us"].post("/v1/completions", body)
        assert reply.status == 200
        assert reply.body == back
        assert regions["eu"].servers[0].asked[0].body == body
        await regions.idle()


async def test_a_body_that_is_larger_than_the_other_region_takes_waits_for_this_one(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu") as regions:
        await regions.full("us")
        regions["eu"].lb.inbound.serving.limits = regions["eu"].lb.inbound.serving.limits.__class__(body_bytes=1024)
        large = asyncio.ensure_future(regions["us"].post("/v1/completions", {"model": MODEL, "prompt": "x" * 4096}))
        await spin(lambda: regions["us"].gauge("forwarded_total", region="eu") == 1)
        await spin(lambda: regions["us"].gauge("queue_requests") == 1)
        assert (await regions["us"].chat()).status == 200  # that one is taken there
        assert asked(regions) == {"us": 0, "eu": 1}
        await regions.full("us", full=False)
        assert (await large).status == 200
        assert asked(regions) == {"us": 1, "eu": 1}
        assert regions["us"].gauge("forwarded_total", region="eu") == 2
        await regions.idle()


async def test_models_that_only_another_region_has(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", linked=False, upstream_health_s=0.05) as regions:
        us, eu = regions["us"], regions["eu"]
        other = FakeServer(models=("only-eu",))
        await other.start()
        eu.lb.fleet.listed(eu.lb.fleet.servers[eu.servers[0].url], {MODEL: {"id": MODEL}, "only-eu": {"id": "only-eu"}})
        us.lb.regions.know([peer_of("eu", eu)])
        await regions.knows("us", "eu", room=True, model="only-eu")
        assert (await us.chat(model="only-eu")).status == 200
        assert asked(regions) == {"us": 0, "eu": 1}
        listed = {each["id"] for each in (await us.get("/v1/models")).json["data"]}
        assert listed == {MODEL, "only-eu"}
        eu.lb.fleet.listed(eu.lb.fleet.servers[eu.servers[0].url], {MODEL: {"id": MODEL}})
        await us.until(lambda: "only-eu" not in us.lb.models.by_name)
        assert (await us.chat(model="only-eu")).status == 404
        await regions.idle()
        await other.stop()


async def test_requests_for_several_models_are_told_apart_until_they_have_arrived(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", linked=False) as regions:
        us, eu = regions["us"], regions["eu"]
        eu.servers[0].models = (MODEL, "other")
        eu.lb.fleet.listed(eu.lb.fleet.servers[eu.servers[0].url], {MODEL: {"id": MODEL}, "other": {"id": "other"}})
        us.lb.regions.know([peer_of("eu", eu)])
        await regions.knows("us", "eu", room=True, model="other")
        heard = us.lb.regions._ways
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


# ---------------------------------------------------------------- what ends early


async def test_a_client_that_leaves_is_gone_on_every_hop(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu") as regions:
        await regions.full("us")
        server, began = regions["eu"].servers[0], asyncio.Event()

        async def forever(asked: Asked, wire: Wire) -> None:
            began.set()
            await asyncio.Event().wait()

        server.answer = forever
        async with Connection(regions["us"].http) as connection:
            connection.send("POST", "/v1/chat/completions", STREAM)
            await began.wait()
            connection.drop()
            await spin(lambda: server.left == 1)
        await regions.idle()


@REPLACES_METHODS
async def test_a_deadline_crosses_regions(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", linked=False) as regions:
        us, eu = regions["us"], regions["eu"]
        us.lb.regions.know([peer_of("eu", eu)])
        await regions.knows("us", "eu", room=True)
        await regions.full("us")
        us.lb.app._routes._forwarding._limits = us.lb.app._routes._forwarding._limits.__class__(request_s=0.3)
        server = eu.servers[0]

        async def forever(asked: Asked, wire: Wire) -> None:
            await asyncio.Event().wait()

        server.answer = forever
        heads = []
        serving = eu.lb.inbound.serving.forwarding.serve_forwarded

        async def seen(head, body, reply, incoming):
            heads.append(incoming)
            return await serving(head, body, reply, incoming)

        eu.lb.inbound.serving.forwarding.serve_forwarded = seen
        reply = await us.chat()
        assert reply.status == 504
        assert 0 < heads[0].limit_s <= 0.3
        assert heads[0].sender == "us"
        await spin(lambda: server.left == 1)
        await regions.idle()


async def test_a_region_that_dies_before_the_first_byte_is_replaced(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", "ap") as regions:
        us, eu, ap = (regions[name] for name in ("us", "eu", "ap"))
        await regions.full("us")
        await regions.full("ap")
        await regions.knows("us", "ap", room=False)
        began = asyncio.Event()

        async def forever(asked: Asked, wire: Wire) -> None:
            began.set()
            await asyncio.Event().wait()

        eu.servers[0].answer = forever
        asking = asyncio.ensure_future(us.chat())
        await began.wait()
        await regions.full("ap", full=False)
        await regions.knows("us", "ap", room=True)
        await eu.lb.grpc.drain(0)
        assert (await asking).status == 200
        assert asked(regions) == {"us": 0, "eu": 1, "ap": 1}
        await us.idle()
        await ap.idle()


async def test_a_region_that_dies_in_mid_stream_is_an_error_event(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu") as regions:
        await regions.full("us")

        async def half(asked: Asked, wire: Wire) -> None:
            await wire.begin()
            await wire.chunk(b'data: {"n":1}\n\n')
            await asyncio.Event().wait()

        regions["eu"].servers[0].answer = half
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
        assert asked(regions) == {"us": 0, "eu": 1}
        await regions["us"].idle()


async def test_a_server_there_that_breaks_off_is_an_error_event_of_one_kind(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu") as regions:
        await regions.full("us")

        async def broken(asked: Asked, wire: Wire) -> None:
            await wire.begin()
            await wire.chunk(b'data: {"n":1}\n\ndata: {"n":')
            wire.drop()

        regions["eu"].servers[0].answer = broken
        reply = await regions["us"].post("/v1/chat/completions", STREAM)
        assert reply.body.startswith(b'data: {"n":1}\n\ndata: {"error"')
        assert reply.body.count(b"bad_gateway") == 1
        assert reply.body.count(DONE) == 1
        await regions.idle()


async def test_what_a_servers_refuses_there_is_tried_elsewhere_and_then_passed_on(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", "ap", attempts=2) as regions:
        await regions.full("us")

        async def busy(asked: Asked, wire: Wire) -> None:
            await wire.whole(b'{"error":"busy"}', 429, "retry-after: 7\r\n")

        regions["eu"].servers[0].answer = regions["ap"].servers[0].answer = busy
        reply = await regions["us"].chat()
        assert (reply.status, reply.body) == (429, b'{"error":"busy"}')
        assert reply.headers["retry-after"] == "7"
        assert asked(regions) == {"us": 0, "eu": 1, "ap": 1}
        await regions.idle()


async def test_a_region_that_ends_in_good_order_ends_what_it_has(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu") as regions:
        us, eu = regions["us"], regions["eu"]
        await regions.full("us")
        go = asyncio.Event()

        async def slow(asked: Asked, wire: Wire) -> None:
            await wire.begin()
            await wire.chunk(b"data: one\n\n")
            await go.wait()
            await wire.chunk(b"data: two\n\n" + DONE)
            await wire.end()

        eu.servers[0].answer = slow
        async with Connection(us.http) as connection:
            connection.send("POST", "/v1/chat/completions", STREAM)
            assert (await connection.head())[0] == 200
            assert await connection.chunk() == b"data: one\n\n"
            ending = asyncio.ensure_future(eu.lb.close(WAIT_S))
            remote = us.lb.models.by_name[MODEL].layers.remote
            await us.until(lambda: all(each.draining for each in remote))
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


# ---------------------------------------------------------------- never


@REPLACES_METHODS
async def test_nothing_is_forwarded_twice(tmp_path):
    """The second region has no room either, by the time it comes; a third one has: it waits where it is."""
    async with running_upstream_regions(tmp_path, "us", "eu", "ap", linked=False) as regions:
        us, eu, ap = (regions[name] for name in ("us", "eu", "ap"))
        us.lb.regions.know([peer_of("eu", eu)])
        eu.lb.regions.know([peer_of("ap", ap)])
        await regions.knows("us", "eu", room=True)
        await regions.knows("eu", "ap", room=True)
        await regions.full("us")
        remote = us.lb.models.by_name[MODEL].layers.remote
        original = remote.report
        remote.report = lambda *_: None  # type: ignore[method-assign]  # it hears of nothing any more
        await regions.full("eu")
        asking = asyncio.ensure_future(us.chat())
        await spin(lambda: eu.gauge("queue_requests") == 1)
        assert asked(regions) == {"us": 0, "eu": 0, "ap": 0}
        remote.report = original  # type: ignore[method-assign]
        await regions.full("eu", full=False)
        assert (await asking).status == 200
        assert asked(regions) == {"us": 0, "eu": 1, "ap": 0}
        await regions.idle()


async def test_what_another_region_has_no_place_for_is_put_back_and_served_at_home(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", queue_limit=0, in_flight_limit=1) as regions:
        us, eu = regions["us"], regions["eu"]
        go = asyncio.Event()

        async def held(asked: Asked, wire: Wire) -> None:
            await go.wait()
            await generate(asked, wire)

        eu.servers[0].answer = held
        blocking = asyncio.ensure_future(eu.chat())
        await spin(lambda: eu.servers[0].open == 1)
        await regions.full("us")
        asking = asyncio.ensure_future(us.chat())
        await spin(lambda: us.gauge("forwarded_total", region="eu") >= 1)
        await spin(lambda: us.gauge("queue_requests") == 1)
        await regions.full("us", full=False)
        assert (await asking).status == 200
        assert asked(regions) == {"us": 1, "eu": 1}
        go.set()
        assert (await blocking).status == 200
        await regions.idle()


async def test_load_never_overrides_law(tmp_path):
    policy = tmp_path / "geography.json"
    policy.write_text(json.dumps({"regions": {"us": [], "eu": ["gdpr"]}, "tenants": {"acme": ["gdpr"]}}))
    keys = tmp_path / "keys"
    keys.write_text("k-acme acme\nk-other other\n")
    async with running_upstream_regions(
        tmp_path, "us", "eu", geography_file=str(policy), api_keys_file=str(keys), linked=False
    ) as regions:
        us, eu = regions["us"], regions["eu"]
        us.lb.regions.know([peer_of("eu", eu)])
        await regions.knows("us", "eu", room=True)
        acme, other = ({"authorization": f"Bearer k-{name}"} for name in ("acme", "other"))
        assert (await us.chat(headers=acme)).status == 200
        assert (await us.chat(headers=other | {"x-pinyon-geographies": "gdpr"})).status == 200
        assert asked(regions) == {"us": 0, "eu": 2}
        await regions.full("eu")
        await regions.knows("us", "eu", room=False)
        waiting = asyncio.ensure_future(us.chat(headers=acme))
        await spin(lambda: us.gauge("queue_requests") == 1)  # although there is room here
        assert (await us.chat(headers=other)).status == 200  # and it holds up nobody
        await regions.full("eu", full=False)
        assert (await waiting).status == 200
        assert asked(regions) == {"us": 1, "eu": 3}
        nowhere = await us.chat(headers=other | {"x-pinyon-geographies": "mars"})
        assert nowhere.status == 400
        await regions.idle()


async def test_law_is_looked_at_again_where_a_request_comes(tmp_path):
    """The sender's policy is another one, by mistake."""
    async with running_upstream_regions(tmp_path, "us", "eu") as regions:
        us, eu = regions["us"], regions["eu"]
        await regions.full("us")
        eu.lb.inbound.serving.arrivals._geography = lambda: parse_geography({
            "regions": {"us": [], "eu": []}, "tenants": {"public": ["us"]},
        })  # fmt: skip
        waiting = asyncio.ensure_future(us.chat())
        await spin(lambda: us.gauge("forwarded_total", region="eu") == 1)
        await spin(lambda: us.gauge("queue_requests") == 1)
        await regions.full("us", full=False)
        assert (await waiting).status == 200
        assert asked(regions) == {"us": 1, "eu": 0}
        await regions.idle()


async def test_a_region_that_is_known_and_was_not_heard_yet_may_come(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", linked=False, placement_wait_s=0.2) as regions:
        us = regions["us"]
        us.lb.regions.know([peer_of("eu", regions["eu"]).__class__("lb-eu", "eu", "127.0.0.1:1")])
        assert (await us.chat(headers={"x-pinyon-geographies": "eu"})).status == 503
        assert (await us.chat(headers={"x-pinyon-geographies": "mars"})).status == 400
        await regions.idle()


# ---------------------------------------------------------------- who is no peer


async def test_another_secret_is_no_peer(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", linked=False) as regions:
        us, eu = regions["us"], regions["eu"]
        eu.lb.inbound.secret = b"another secret altogether"
        us.lb.regions.know([peer_of("eu", eu)])
        (link,) = us.lb.regions.links
        await spin(lambda: link._talk is not None)
        await spin(lambda: link._talk is None)
        assert not link.sessions
        assert not len(us.lb.models.by_name[MODEL].layers.remote)


async def test_kinds_do_not_mix(tmp_path):
    async with (
        running_upstream_regions(tmp_path, "us", linked=False) as regions,
        running_lb(1, name="lb-eu", region="eu", federation_secret_file=str(tmp_path / "federation-secret")) as tokens,
    ):
        us = regions["us"]
        for lb, peer in ((us.lb, peer_of("eu", tokens)), (tokens.lb, peer_of("us", us))):
            lb.regions.know([peer])
            (link,) = lb.regions.links
            await spin(lambda link=link: link._talk is not None)
            await spin(lambda link=link: link._talk is None)
            assert not link.sessions
        assert (await us.chat()).status == 200


async def test_the_controller_says_who_the_others_are(tmp_path):
    async with (
        running_controller() as (controller, address, metrics),
        running_upstream_regions(tmp_path, "us", "eu", linked=False, controller=address) as regions,
    ):
        us, eu = regions["us"], regions["eu"]
        await regions.knows("us", "eu", room=True)
        await regions.knows("eu", "us", room=True)
        await regions.full("us")
        assert (await us.chat()).status == 200
        assert asked(regions) == {"us": 0, "eu": 1}
        assert us.gauge("forwarded_total", region="eu") == 1
        assert us.lb.membership.load().forwarded_by_region == {"eu": 1}
        (server,) = us.lb.membership.load().per_instance
        assert (server.name, server.pending) == (us.servers[0].url, 1)
        probes = ("pinyon_controller_probes_total", {"outcome": "answered"})
        await spin(lambda: (metrics.get_sample_value(*probes) or 0) >= 2)
        assert not controller.registry.failures
        await eu.lb.close(0)
        await us.until(lambda: not len(us.lb.models.by_name[MODEL].layers.remote))
        await us.idle()


class Caller:
    """Somebody who speaks the protocol, and may do what no load balancer of ours does."""

    def __init__(self, bench) -> None:
        self._channel = grpc.aio.insecure_channel(bench.endpoints["grpc"])
        self.call = peer_pb2_grpc.PeerServiceStub(self._channel).Session()

    async def __aenter__(self) -> Caller:
        hello = peer_pb2.PeerHello(region="eu", lb_id="x", nonce=b"n" * 16, version=1, kind=peer_pb2.PEER_KIND_UPSTREAM)
        await self.call.write(peer_pb2.SessionRequest(hello=hello))
        self.nonce = (await self.call.read()).welcome.nonce
        await self.call.write(peer_pb2.SessionRequest(proof=caller_proof(SECRET, self.nonce, "eu", "x")))
        return self

    async def __aexit__(self, *_) -> None:
        self.call.cancel()
        await self._channel.close()

    def request(self, body: bytes = STREAM, *, hops: int = 1, secret: bytes = SECRET, **fields) -> peer_pb2.RawRequest:
        values = {"stream_id": 1, "request_id": "r", "target": b"/v1/chat/completions", "model": MODEL,
                  "body_length": len(body), "body_sha256": sha256(body).digest()} | fields  # fmt: skip
        head = peer_pb2.RawHead(**values).SerializeToString()
        return peer_pb2.RawRequest(head=head, hops=hops, proof=raw_proof(secret, self.nonce, hops, head), body=body)

    async def ask(self, *requests: peer_pb2.RawRequest, **more) -> None:
        await self.call.write(peer_pb2.SessionRequest(raw_requests=requests, **more))

    async def answer(self) -> list[peer_pb2.RawPiece]:
        """To its end."""
        pieces: list[peer_pb2.RawPiece] = []
        async with asyncio.timeout(WAIT_S):
            while not pieces or not (pieces[-1].end or pieces[-1].HasField("error")):
                message = await self.call.read()
                assert message is not grpc.aio.EOF
                pieces += message.raw_pieces
        return pieces

    async def status(self) -> grpc.StatusCode:
        with contextlib.suppress(grpc.aio.AioRpcError):
            while await self.call.read() is not grpc.aio.EOF:
                pass
        return await self.call.code()


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        (lambda caller: caller.request(secret=b"guessed, and not right"), grpc.StatusCode.PERMISSION_DENIED),
        (lambda caller: peer_pb2.RawRequest(head=b"\xff", hops=1), grpc.StatusCode.PERMISSION_DENIED),
        (lambda caller: caller.request(body_length=3), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda caller: caller.request(stream_id=0), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_caller_that_is_none_of_ours_is_ended(request_of, code, tmp_path):
    async with running_upstream_regions(tmp_path, "us") as regions, Caller(regions["us"]) as caller:
        await caller.ask(request_of(caller))
        assert await caller.status() is code
        assert asked(regions) == {"us": 0}
        await regions.idle()


async def test_requests_of_the_other_kind_end_the_session(tmp_path):
    async with running_upstream_regions(tmp_path, "us") as regions, Caller(regions["us"]) as caller:
        await caller.call.write(peer_pb2.SessionRequest(requests=[peer_pb2.ForwardedRequest(hops=1)]))
        assert await caller.status() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("fields", "hops", "said"),
    [
        ({}, 2, "come through 2 regions"),
        ({"body_sha256": bytes(32)}, 1, "its body is another one"),
        ({"target": b"/metrics"}, 1, "not served to other regions"),
        ({"target": b"/v1/load_lora_adapter"}, 1, "not served to other regions"),
        ({"target": b"/v1/x HTTP/1.1\r\nx: y"}, 1, "no target"),
        ({"fields": b"x: y\r\n\r\n"}, 1, "no header field"),
        ({"fields": b"x: a\nb\r\n"}, 1, "no header field"),
        ({"model": "nonsense"}, 1, "does not exist"),
        ({"request_id": "x\r\ny"}, 1, "not printable"),
        ({"body_length": 1 << 40}, 1, "larger than"),
    ],
)
async def test_what_must_not_be_served_is_refused(fields, hops, said, tmp_path):
    async with running_upstream_regions(tmp_path, "us") as regions, Caller(regions["us"]) as caller:
        body = b'{"messages":[]}' if "model" in fields else STREAM
        await caller.ask(caller.request(body, hops=hops, **fields))
        (piece,) = await caller.answer()
        assert said in piece.error.message
        assert asked(regions) == {"us": 0}
        await caller.ask(caller.request(stream_id=2))  # the session lives on
        assert (await caller.answer())[0].answer.status == 200
        await regions.idle()


async def test_what_is_cancelled_at_once_leaves_nothing(tmp_path):
    async with running_upstream_regions(tmp_path, "us") as regions, Caller(regions["us"]) as caller:
        await caller.ask(caller.request(body_length=1000), cancel_stream_ids=[1])
        await caller.ask(caller.request(stream_id=2))
        await caller.answer()
        (session,) = regions["us"].lb.inbound.sessions
        await spin(lambda: not session.running)
        assert not session._requests._arriving
        assert not session._requests._replies
        await regions.idle()


# ---------------------------------------------------------------- no more than is bounded


async def much(asked: Asked, wire: Wire) -> None:
    await wire.begin()
    event = b"data: " + b"x" * 8192 + b"\n\n"
    for _ in range(4500):
        await wire.chunk(event)
    await wire.chunk(DONE)
    await wire.end()


async def test_who_takes_nothing_makes_the_server_wait(tmp_path):
    async with running_upstream_regions(tmp_path, "us") as regions, Caller(regions["us"]) as caller:
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
        (session,) = regions["us"].lb.inbound.sessions
        assert len(session._outbox) == 0
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


async def test_a_slow_client_is_waited_for_on_every_hop(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu") as regions:
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
        (stream,) = link._talk.raw._streams.values()
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


# ---------------------------------------------------------------- who is in whose way


async def test_requests_for_a_region_that_is_away_hold_up_nobody(tmp_path):
    async with running_upstream_regions(
        tmp_path, "us", linked=False, in_flight_limit=8, queue_limit=64, placement_wait_s=600.0
    ) as regions:
        us = regions["us"]
        us.lb.regions.know([Peer("lb-eu", "eu", "127.0.0.1:1")])
        away = [asyncio.ensure_future(us.chat(headers={"x-pinyon-geographies": "eu"})) for _ in range(16)]
        await spin(lambda: sum(each.done() for each in away) == 14)
        assert {(await each).status for each in away if each.done()} == {503}
        assert (await us.chat()).status == 200
        for each in away:
            each.cancel()
        await asyncio.gather(*away, return_exceptions=True)


async def test_what_other_regions_serve_does_not_change_what_is_meant_by_no_model(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", linked=False) as regions:
        us, eu = regions["us"], regions["eu"]
        eu.lb.fleet.listed(eu.lb.fleet.servers[eu.servers[0].url], {MODEL: {"id": MODEL}, "other": {"id": "other"}})
        us.lb.regions.know([peer_of("eu", eu)])
        await regions.knows("us", "eu", room=True, model="other")
        assert (await us.post("/v1/completions", {"prompt": "x"})).status == 200


async def test_what_a_dying_region_gives_back_goes_before_what_came_later(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", placement_wait_s=600.0) as regions:
        us, eu = regions["us"], regions["eu"]
        await regions.full("us")

        async def forever(asked, wire):
            await asyncio.Event().wait()

        eu.servers[0].answer = forever
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
        us.lb.models.use_pushing("outstanding:limit=1")
        us.servers[0].waiting = 0
        assert {(await each).status for each in (*victims, *later)} == {200}
        assert served[:3] == ["victim"] * 3


async def test_attempts_do_not_multiply_over_regions(tmp_path):
    async with running_upstream_regions(tmp_path, "us", "eu", attempts=3) as regions:
        us, eu = regions["us"], regions["eu"]

        async def poison(asked, wire):
            wire.drop()

        for bench in (us, eu):
            bench.servers[0].answer = poison
        assert (await us.chat()).status == 502
        assert sum(us.asked) + sum(eu.asked) <= 3
