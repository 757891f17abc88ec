"""The proof of being a load balancer of another region in front of other makers' servers, and what it may ask for."""

from __future__ import annotations

import contextlib
from pathlib import Path

import grpc
import pytest

from pinyon.api.lb.v1 import peer_pb2, peer_pb2_grpc
from pinyon.frontdoor.regions.links import PEER_VERSION
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.runtime.channel import Channels
from pinyon.runtime.identity import peer_name
from pinyon.runtime.security import Security
from tests.integration.controller_parts import running_controller
from tests.integration.lb_harness import running_lb, spin
from tests.integration.regions_harness import peer_of
from tests.integration.upstream_caller import Caller
from tests.integration.upstream_parts import FakeServer, running_upstreams
from tests.integration.upstream_regions_parts import STREAM, running_upstream_regions
from tests.tls_files import TestAuthority


def secured(authority: TestAuthority, instance_id: str, region: str) -> Security:
    tls = authority.tls("lb", instance_id, region=region)
    return Security(tls, channels=Channels(tls))


@contextlib.asynccontextmanager
async def running_us(folder: Path):
    """Yields the load balancer of the region us, with TLS, and the authority of its peers."""
    authority = TestAuthority(folder / "ours")
    async with running_upstreams(
        FakeServer(), name="lb-us", region="us", security=secured(authority, "lb-us", "us")
    ) as us:
        yield us, authority


@pytest.mark.parametrize(
    ("role", "instance_id", "region", "authority", "code"),
    [
        ("lb", "lb-eu", "eu", "ours", None),
        ("lb", "", "eu", "ours", None),
        ("lb", "lb-eu", "us", "ours", grpc.StatusCode.PERMISSION_DENIED),
        ("lb", "lb-eu", "", "ours", grpc.StatusCode.PERMISSION_DENIED),
        ("lb", "lb-ap", "eu", "ours", grpc.StatusCode.PERMISSION_DENIED),
        ("worker", "lb-eu", "", "ours", grpc.StatusCode.PERMISSION_DENIED),
        ("admin", "lb-eu", "", "ours", grpc.StatusCode.PERMISSION_DENIED),
        ("lb", "lb-eu", "eu", "theirs", grpc.StatusCode.UNAVAILABLE),
    ],
    ids=["its own", "any of its region", "another region", "no region", "another id", "a worker", "an admin", "forged"],
)
async def test_only_a_certificate_makes_a_peer(role, instance_id, region, authority, code, tmp_path: Path):
    """The caller claims to be lb-eu of the region eu; its certificate decides."""
    async with running_us(tmp_path) as (us, ours):
        issuer = ours if authority == "ours" else TestAuthority(tmp_path / authority)
        folder = issuer.folder(role, instance_id, region=region)
        credentials = grpc.ssl_channel_credentials(
            (ours.folder("lb", "lb-us", region="us") / "ca.crt").read_bytes(),
            (folder / "tls.key").read_bytes(),
            (folder / "tls.crt").read_bytes(),
        )
        options = (("grpc.ssl_target_name_override", peer_name("lb")),)
        async with grpc.aio.secure_channel(us.endpoints["admin"], credentials, options) as channel:
            call = peer_pb2_grpc.PeerServiceStub(channel).Session()
            kind = peer_pb2.PEER_KIND_UPSTREAM
            hello = peer_pb2.PeerHello(region="eu", lb_id="lb-eu", version=PEER_VERSION, kind=kind)
            answers = []
            with contextlib.suppress(grpc.aio.AioRpcError):
                if role == "lb":  # others are refused at once: grpcio calls a write to an ended call INTERNAL
                    await call.write(peer_pb2.SessionRequest(hello=hello))
                answers.append(await call.read())
            if code is None:
                assert answers[0].welcome.region == "us"
                call.cancel()
            else:
                assert not answers or answers == [grpc.aio.EOF]
                assert await call.code() is code
                if role != "lb":
                    assert f"role {role} may not call" in await call.details()
        assert us.lb.serving.running == 0


async def test_without_a_certificate_nobody_is_a_peer(tmp_path: Path):
    """The port of users' programs asks for no certificate."""
    async with running_us(tmp_path) as (us, ours):
        ca = (ours.folder("lb", "lb-us", region="us") / "ca.crt").read_bytes()
        options = (("grpc.ssl_target_name_override", peer_name("lb")),)
        async with grpc.aio.secure_channel(us.endpoints["grpc"], grpc.ssl_channel_credentials(ca), options) as channel:
            call = peer_pb2_grpc.PeerServiceStub(channel).Session()
            assert await call.code() is grpc.StatusCode.UNAUTHENTICATED


@pytest.mark.parametrize(
    ("region", "authority", "spoken_with"),
    [("eu", "ours", True), ("us", "ours", False), ("", "ours", False), ("eu", "theirs", False)],
    ids=["its own", "another region", "no region", "forged"],
)
async def test_another_certificate_is_no_peer(region, authority, spoken_with, tmp_path: Path):
    """A server answers at the address of the region eu; its certificate decides."""
    async with running_us(tmp_path) as (us, ours):
        issuer = ours if authority == "ours" else TestAuthority(tmp_path / authority)
        security = secured(issuer, "lb-eu", region)
        async with running_upstreams(FakeServer(), name="lb-eu", region="eu", security=security) as eu:
            us.lb.regions.know([PeerBalancer("lb-eu", "eu", eu.endpoints["admin"])])
            (link,) = us.lb.regions.links
            await spin(lambda: link.talk is not None)
            await spin(lambda: link.connected if spoken_with else link.talk is None)
            assert link.sessions == spoken_with
            await spin(lambda: bool(us.remote()) is spoken_with)


async def test_kinds_do_not_mix():
    async with (
        running_upstream_regions("us", linked=False) as regions,
        running_lb(1, name="lb-eu", region="eu") as tokens,
    ):
        us = regions["us"]
        for lb, peer in ((us.lb, peer_of("eu", tokens)), (tokens.lb, peer_of("us", us))):
            lb.regions.know([peer])
            (link,) = lb.regions.links
            await spin(lambda link=link: link.talk is not None)
            await spin(lambda link=link: link.talk is None)
            assert not link.sessions
        assert (await us.chat()).status == 200


async def test_the_controller_says_who_the_others_are():
    async with (
        running_controller() as (controller, address, metrics),
        running_upstream_regions("us", "eu", linked=False, controller=address) as regions,
    ):
        us, eu = regions["us"], regions["eu"]
        await regions.knows("us", "eu", room=True)
        await regions.knows("eu", "us", room=True)
        await regions.full("us")
        assert (await us.chat()).status == 200
        assert regions.asked() == {"us": 0, "eu": 1}
        assert us.gauge("forwarded_total", region="eu") == 1
        assert us.lb.membership.load().forwarded_by_region == {"eu": 1}
        (server,) = us.lb.membership.load().per_instance
        assert (server.name, server.pending) == (us.servers[0].url, 1)
        probes = ("pinyon_controller_probes_total", {"outcome": "answered"})
        await spin(lambda: (metrics.get_sample_value(*probes) or 0) >= 2)
        assert not controller.registry.failures
        await eu.lb.close(0)
        await us.until(lambda: not us.remote())
        await us.idle()


@pytest.mark.parametrize(
    ("request_of", "code"),
    [
        (lambda caller: peer_pb2.RawRequest(head=b"\xff", hops=1), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda caller: caller.request(body_length=3), grpc.StatusCode.INVALID_ARGUMENT),
        (lambda caller: caller.request(stream_id=0), grpc.StatusCode.INVALID_ARGUMENT),
    ],
)
async def test_a_caller_that_is_none_of_ours_is_ended(request_of, code):
    async with running_upstream_regions("us") as regions, Caller(regions["us"]) as caller:
        await caller.ask(request_of(caller))
        assert await caller.status() is code
        assert regions.asked() == {"us": 0}
        await regions.idle()


async def test_requests_of_the_other_kind_end_the_session():
    async with running_upstream_regions("us") as regions, Caller(regions["us"]) as caller:
        await caller.call.write(peer_pb2.SessionRequest(requests=[peer_pb2.ForwardedRequest(hops=1)]))
        assert await caller.status() is grpc.StatusCode.FAILED_PRECONDITION


@pytest.mark.parametrize(
    ("fields", "hops", "said"),
    [
        ({}, 2, "come through 2 regions"),
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
async def test_what_must_not_be_served_is_refused(fields, hops, said):
    async with running_upstream_regions("us") as regions, Caller(regions["us"]) as caller:
        body = b'{"messages":[]}' if "model" in fields else STREAM
        await caller.ask(caller.request(body, hops=hops, **fields))
        (piece,) = await caller.answer()
        assert said in piece.error.message
        assert regions.asked() == {"us": 0}
        await caller.ask(caller.request(stream_id=2))  # the session continues
        assert (await caller.answer())[0].answer.status == 200
        await regions.idle()


async def test_what_is_cancelled_at_once_leaves_nothing():
    async with running_upstream_regions("us") as regions, Caller(regions["us"]) as caller:
        await caller.ask(caller.request(body_length=1000), cancel_stream_ids=[1])
        await caller.ask(caller.request(stream_id=2))
        await caller.answer()
        (session,) = regions["us"].lb.serving.sessions
        await spin(lambda: not session.running)
        assert not session._requests
        await regions.idle()
