"""Load balancers and the controller together: another load balancer serves the instances of one that fails."""

from __future__ import annotations

import asyncio
import contextlib
import json

import grpc
import pytest

from pinyon.api.admin.v1 import admin_pb2, admin_pb2_grpc
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.federation.view import LbState
from pinyon.frontdoor.instances.instances import ConductorCluster
from tests.integration.controller_parts import running_controller
from tests.integration.lb_harness import Bench, expected_text, spin
from tests.integration.regions_harness import FULL, ROOMY, TokenRegions, running_regions


@contextlib.asynccontextmanager
async def federated(place_by="conductor", **settings):
    """Yields a controller and two regions that it knows."""
    async with (
        running_controller(**settings) as (controller, address, _),
        running_regions("us", "eu", linked=False, controller=address, place_by=place_by) as regions,
    ):
        await spin(lambda: len(controller.registry.federation.members) == 2)
        yield controller, regions


async def dies(us: Bench, eu: Bench, regions: TokenRegions) -> ConductorCluster:
    """Ends the session and the port of one load balancer. The other, whose region is full, then has its cluster."""
    await regions.knows("eu", "us", room=True)
    assert not eu.lb.clusters.adopted
    await us.lb.membership._link.close()
    await us.lb.grpc.drain(0)
    await spin(lambda: set(eu.lb.clusters.adopted) == {"us/us"})
    cluster = eu.lb.clusters.get("us/us")
    await spin(lambda: bool(cluster.addresses))
    regions.say("eu", FULL)
    cluster.heard(us.workers[0].address, ROOMY, eu.lb.clock())
    return cluster


@pytest.mark.parametrize("place_by", ["conductor", "routing"])
async def test_instances_of_a_failed_balancer_are_served_by_another(place_by):
    async with federated(place_by) as (controller, regions):
        us, eu = regions["us"], regions["eu"]
        await dies(us, eu, regions)
        (member,) = [each for each in controller.registry.federation.members if each.info.region == "us"]
        assert member.state is LbState.FAILED
        reply = await eu.complete(max_tokens=5)
        assert reply.status == 200
        assert reply.json["choices"][0]["text"] == expected_text(5, 5)
        assert (len(us.workers[0].submissions), len(eu.workers[0].submissions)) == (1, 0)
        await regions.idle()


async def test_who_drains_hands_its_instances_over_and_gets_them_back():
    async with federated() as (controller, regions):
        us, eu = regions["us"], regions["eu"]
        us.lb.readiness.draining = True
        await spin(lambda: set(eu.lb.clusters.adopted) == {"us/us"})
        us.lb.readiness.draining = False
        await spin(lambda: not eu.lb.clusters.adopted)
        assert controller.registry.failures == 0


async def silent(controller, bench) -> None:
    """Makes the load balancer report only changes from now on."""
    session = bench.lb.membership
    session.period_s = 3600.0
    (member,) = [each for each in controller.registry.watched() if each.info.region == bench.lb.models.region]
    heard_s = member.heard_s
    session.wake()
    await spin(lambda: member.heard_s > heard_s)


async def test_who_begins_to_drain_says_so_at_once():
    async with federated(silence_s=600.0) as (controller, regions):
        us, eu = regions["us"], regions["eu"]
        await silent(controller, us)
        async with grpc.aio.insecure_channel(us.endpoints["grpc"]) as channel:
            admin = admin_pb2_grpc.AdminServiceStub(channel)
            await admin.Apply(admin_pb2.ApplyRequest(settings=[admin_pb2.Setting(name="draining", value="true")]))
            await spin(lambda: set(eu.lb.clusters.adopted) == {"us/us"})
            await admin.Apply(admin_pb2.ApplyRequest(settings=[admin_pb2.Setting(name="draining", value="false")]))
            await spin(lambda: not eu.lb.clusters.adopted)


async def test_who_ends_says_so_before_it_waits_for_what_runs():
    async with federated(silence_s=600.0) as (controller, regions):
        us, eu = regions["us"], regions["eu"]
        running = await us.held(max_tokens=3)
        await silent(controller, us)
        ending = asyncio.create_task(us.lb.close(60.0))
        await spin(lambda: set(eu.lb.clusters.adopted) == {"us/us"})
        assert not ending.done()
        us.workers[0].go.set()
        assert (await running).json["choices"][0]["text"] == expected_text(5, 3)
        await ending


async def test_law_forbids_adoption(tmp_path):
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"regions": {"us": [], "eu": ["gdpr"]}, "rules": [{"from": ["eu"], "to": ["eu"]}]}))
    async with federated(geography=str(policy)) as (controller, regions):
        for bench in regions.values():
            bench.lb.readiness.draining = True
        await spin(lambda: [each.state for each in controller.registry.federation.members] == [LbState.DRAINING] * 2)
        regions["us"].lb.readiness.draining = False
        await spin(lambda: LbState.LIVE in [each.state for each in controller.registry.federation.members])
        assert not regions["us"].lb.clusters.adopted
        assert all(not each.adopter for each in controller.registry.federation.clusters)


async def test_given_back_while_a_request_is_placed_it_runs_there():
    """The request counts where it runs, and not at the instance of that name at home."""
    async with federated() as (_, regions):
        us, eu = regions["us"], regions["eu"]
        cluster = await dies(us, eu, regions)
        us.conductor.late.clear()
        us.workers[0].hold()
        asked = len(us.conductor.requests)
        running = asyncio.create_task(eu.complete(max_tokens=5))
        await spin(lambda: len(us.conductor.requests) > asked)
        # The answer arrives, and in the same turn of the loop the controller takes the cluster back.
        placed = us.conductor._answer(us.conductor.requests[-1])
        cluster.conductor._take(conductor_pb2.ScheduleSessionResponse(responses=[placed]))
        eu.lb.clusters.adopt({})
        await us.workers[0].until(lambda: us.workers[0].open)
        assert (cluster.in_flight, eu.lb.clusters.home.in_flight) == (2, 0)
        us.workers[0].go.set()
        us.conductor.late.set()
        assert (await running).status == 200
        assert cluster.in_flight == 0
