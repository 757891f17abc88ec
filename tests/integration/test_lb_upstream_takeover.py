"""Load balancers in front of other makers' servers, and the controller: who serves the servers of one that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json
from collections.abc import AsyncIterator

import grpc

from pinyon.api.controller.v1 import controller_pb2, controller_pb2_grpc
from pinyon.federation.view import LbState
from pinyon.frontdoor.upstreams.url import UpstreamKeys
from tests.integration.controller_parts import running_controller
from tests.integration.lb_harness import spin
from tests.integration.upstream_parts import MODEL, FakeServer, after
from tests.integration.upstream_regions_parts import running_upstream_regions


@contextlib.asynccontextmanager
async def serving_stub() -> AsyncIterator[FakeServer]:
    server = FakeServer()
    await server.start()
    try:
        yield server
    finally:
        await server.stop()


@contextlib.asynccontextmanager
async def federated(**settings):
    """Yields a controller and two regions that it knows."""
    async with (
        running_controller() as (controller, address, _),
        running_upstream_regions("us", "eu", linked=False, controller=address, **settings) as regions,
    ):
        await spin(lambda: len(controller.registry.federation.members) == 2)
        await regions.knows("eu", "us", room=True)
        yield controller, address, regions


def adopted(bench) -> set[str]:
    return set(bench.lb.clusters.adopted)


async def until_adopted(regions) -> None:
    eu = regions["eu"]
    await spin(lambda: adopted(eu) == {"us/us"})
    layer = eu.lb.models.by_name[MODEL].layers.adopted["us/us"][1]
    await eu.until(lambda: any(each.live and each.reported_s > 0 for each in layer))


async def test_the_servers_of_one_that_fails_are_served_by_another_one():
    async with federated() as (controller, _, regions):
        us, eu = regions["us"], regions["eu"]
        assert not adopted(eu)
        # It dies: both its session and its port are gone.
        await us.lb.membership._link.close()
        await us.lb.grpc.drain(0)
        await until_adopted(regions)
        (member,) = [each for each in controller.registry.federation.members if each.info.region == "us"]
        assert member.state is LbState.FAILED
        await regions.full("eu")
        assert (await eu.chat()).status == 200
        assert (len(us.servers[0].asked), len(eu.servers[0].asked)) == (1, 0)
        page = (await eu.get("/metrics")).body.decode()
        assert f'pinyon_lb_upstream_live{{upstream="{us.servers[0].url}"}} 1.0' in page
        await eu.idle()


async def test_adopted_servers_are_shown_only_their_own_keys(tmp_path):
    file = tmp_path / "keys"
    file.write_text("for-all\nhttp://elsewhere:1 for-elsewhere\n")
    async with federated(upstream_api_key_file=str(file)) as (_, _, regions):
        us, eu = regions["us"], regions["eu"]
        (theirs,), (ours,) = us.servers, eu.servers
        assert (await eu.chat(headers={"x-pinyon-geographies": "eu"})).status == 200
        assert ours.asked[-1]["authorization"] == "Bearer for-all"
        us.lb.readiness.draining = True
        await until_adopted(regions)
        await regions.full("eu")
        assert (await eu.chat()).status == 200
        assert "authorization" not in theirs.asked[-1]
        eu.lb.use_keys(UpstreamKeys("for-all", {theirs.url: "for-us"}))
        assert (await eu.chat()).status == 200
        assert theirs.asked[-1]["authorization"] == "Bearer for-us"
        await eu.idle()


async def test_law_of_the_servers_region_counts(tmp_path):
    policy = tmp_path / "geography.json"
    policy.write_text(json.dumps({"regions": {"us": [], "eu": ["gdpr"]}}))
    async with federated(geography_file=str(policy)) as (_, _, regions):
        us, eu = regions["us"], regions["eu"]
        us.lb.readiness.draining = True
        await until_adopted(regions)
        await spin(lambda: not any(each.live and not each.draining for each in eu.remote()))
        assert (await eu.chat(headers={"x-pinyon-geographies": "us"})).status == 200
        assert (len(us.servers[0].asked), len(eu.servers[0].asked)) == (1, 0)
        await regions.full("eu")
        waiting = asyncio.ensure_future(eu.chat(headers={"x-pinyon-geographies": "eu"}))
        await spin(lambda: eu.gauge("queue_requests") == 1)
        assert (await eu.chat()).status == 200
        await regions.full("eu", full=False)
        assert (await waiting).status == 200
        assert (len(us.servers[0].asked), len(eu.servers[0].asked)) == (2, 1)
        await eu.idle()


async def test_what_runs_on_servers_that_are_given_back_runs_on():
    async with federated() as (_, _, regions):
        us, eu = regions["us"], regions["eu"]
        us.lb.readiness.draining = True
        await until_adopted(regions)
        await regions.full("eu")
        go = asyncio.Event()

        us.servers[0].answer = after(go)
        running = asyncio.ensure_future(eu.chat())
        await spin(lambda: us.servers[0].open == 1)
        fleet = eu.lb.clusters.targets("us/us")
        us.lb.readiness.draining = False
        await spin(lambda: not adopted(eu))
        assert not eu.lb.models.by_name[MODEL].layers.adopted
        go.set()
        assert (await running).status == 200
        await spin(lambda: not fleet.leaving)
        await eu.idle()


async def test_servers_are_added_and_removed_by_hand():
    async with (
        serving_stub() as other,
        federated() as (_, address, regions),
        grpc.aio.insecure_channel(address) as channel,
    ):
        us = regions["us"]
        stub = controller_pb2_grpc.ControllerServiceStub(channel)
        (own,) = us.servers
        servers = us.lb.fleet.servers

        def removed() -> set[str]:
            return {name for name, each in servers.items() if each.removed}

        here = {"x-pinyon-geographies": "us"}  # servers that were not probed since are passed over
        await stub.AddInstance(controller_pb2.AddInstanceRequest(region="us", cluster="us", instance=other.url))
        await us.until(lambda: other.url in [name for name, each in servers.items() if each.healthy])
        await stub.RemoveInstance(controller_pb2.RemoveInstanceRequest(region="us", cluster="us", instance=own.url))
        await us.until(lambda: removed() == {own.url})
        for _ in range(3):
            assert (await us.chat(headers=here)).status == 200
        assert (len(own.asked), len(other.asked)) == (0, 3)
        await stub.AddInstance(controller_pb2.AddInstanceRequest(region="us", cluster="us", instance=own.url))
        await stub.RemoveInstance(controller_pb2.RemoveInstanceRequest(region="us", cluster="us", instance=other.url))
        await us.until(lambda: list(servers) == [own.url] and not removed())
        assert (await us.chat(headers=here)).status == 200
        assert (len(own.asked), len(other.asked)) == (1, 3)
        await us.idle()


async def test_a_balancer_that_left_in_good_order_is_stood_in_for():
    """The region is then known by its servers, not by a load balancer."""
    async with federated() as (_, _, regions):
        us, eu = regions["us"], regions["eu"]
        us.lb.readiness.draining = True
        await us.lb.membership.close()
        await us.lb.grpc.drain(0)
        await until_adopted(regions)
        await spin(lambda: not eu.lb.models.others)
        assert (await eu.chat(headers={"x-pinyon-geographies": "us"})).status == 200
        await regions.full("eu")
        only_eu = asyncio.ensure_future(eu.chat(headers={"x-pinyon-geographies": "eu"}))
        await spin(lambda: eu.gauge("queue_requests") == 1)
        assert (await eu.chat()).status == 200, "us has room"
        assert not only_eu.done()
        await regions.full("eu", full=False)
        assert (await only_eu).status == 200
