"""Who is a load balancer of another region in front of other people's servers, and what it may ask for."""

from __future__ import annotations

import grpc
import pytest

from pinyon.api.lb.v1 import peer_pb2
from tests.integration.controller_parts import running_controller
from tests.integration.lb_harness import running_lb, spin
from tests.integration.upstream_caller import Caller
from tests.integration.upstream_parts import MODEL
from tests.integration.upstream_regions_parts import STREAM, peer_of, running_upstream_regions


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
        assert regions.asked() == {"us": 0}
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
        assert regions.asked() == {"us": 0}
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
