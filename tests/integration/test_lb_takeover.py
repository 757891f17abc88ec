"""Load balancers and the controller together: the instances of one that fails are served by another one."""

from __future__ import annotations

import asyncio
import contextlib
import json

from pinyon.federation.members import LbState
from tests.integration.controller_parts import running_controller
from tests.integration.lb_harness import MODEL, expected_text, spin
from tests.integration.regions_harness import FULL, ROOMY, running_regions


@contextlib.asynccontextmanager
async def federated(folder, **settings):
    """A controller and two regions that it knows."""
    async with (
        running_controller(**settings) as (controller, address, _),
        running_regions(folder, "us", "eu", linked=False, controller=address) as regions,
    ):
        await spin(lambda: len(controller.registry.federation.members) == 2)
        yield controller, regions


async def test_the_instances_of_one_that_fails_are_served_by_another_one(tmp_path):
    async with federated(tmp_path) as (controller, regions):
        us, eu = regions["us"], regions["eu"]
        await regions.knows("eu", "us", ROOMY)
        assert not eu.lb.clusters.adopted
        # It dies: neither its session nor its door is there any more.
        await us.lb.membership.session._link.close()
        await us.lb.grpc.drain(0)
        await spin(lambda: set(eu.lb.clusters.adopted) == {"us/us"})
        (member,) = [each for each in controller.registry.federation.members if each.info.region == "us"]
        assert member.state is LbState.FAILED
        await spin(lambda: bool(eu.lb.clusters.get("us/us").view.addresses))
        regions.say("eu", FULL)
        eu.lb.ways.load("us/us", MODEL, "w0", ROOMY)
        reply = await eu.complete(max_tokens=5)
        assert reply.status == 200
        assert reply.json["choices"][0]["text"] == expected_text(5, 5)
        assert (len(us.workers[0].submissions), len(eu.workers[0].submissions)) == (1, 0)
        await regions.idle()


async def test_who_drains_hands_its_instances_over_and_gets_them_back(tmp_path):
    async with federated(tmp_path) as (controller, regions):
        us, eu = regions["us"], regions["eu"]
        us.lb.app.draining = True
        await spin(lambda: set(eu.lb.clusters.adopted) == {"us/us"})
        us.lb.app.draining = False
        await spin(lambda: not eu.lb.clusters.adopted)
        assert controller.registry.failures == 0


async def test_who_begins_to_end_says_so_at_once(tmp_path):
    async with federated(tmp_path) as (_, regions):
        us, eu = regions["us"], regions["eu"]
        us.lb.membership.session._period_s = 3600.0
        us.lb.membership.session.wake()  # the period it waits for was another one
        ending = asyncio.ensure_future(us.lb.close(0.0, lame_duck_s=3600.0))
        await spin(lambda: set(eu.lb.clusters.adopted) == {"us/us"})
        ending.cancel()
        await asyncio.wait({ending})


async def test_law_forbids_adoption(tmp_path):
    policy = tmp_path / "policy.json"
    policy.write_text(json.dumps({"regions": {"us": [], "eu": ["gdpr"]}, "rules": [{"from": ["eu"], "to": ["eu"]}]}))
    async with federated(tmp_path, geography=str(policy)) as (controller, regions):
        for bench in regions.values():
            bench.lb.app.draining = True
        await spin(lambda: [each.state for each in controller.registry.federation.members] == [LbState.DRAINING] * 2)
        regions["us"].lb.app.draining = False
        await spin(lambda: LbState.LIVE in [each.state for each in controller.registry.federation.members])
        assert not regions["us"].lb.clusters.adopted
        assert all(not each.adopter for each in controller.registry.federation.clusters)
