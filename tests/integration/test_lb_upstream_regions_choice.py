"""The region that serves a request for other makers' servers: by room, by law, forwarded once."""

from __future__ import annotations

import asyncio
import json

from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.routing.geography import parse_geography
from tests.integration.lb_harness import spin
from tests.integration.regions_harness import peer_of
from tests.integration.upstream_parts import DROP, MODEL, after, says
from tests.integration.upstream_regions_parts import running_upstream_regions
from tests.on_compiled import REPLACES_METHODS


@REPLACES_METHODS
async def test_nothing_is_forwarded_twice():
    """A request forwarded to a region that is full by then waits there, although a third region has room."""
    async with running_upstream_regions("us", "eu", "ap", linked=False) as regions:
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
        assert regions.asked() == {"us": 0, "eu": 0, "ap": 0}
        remote.report = original  # type: ignore[method-assign]
        await regions.full("eu", full=False)
        assert (await asking).status == 200
        assert regions.asked() == {"us": 0, "eu": 1, "ap": 0}
        await regions.idle()


async def test_a_request_refused_elsewhere_is_put_back_and_served_home():
    async with running_upstream_regions("us", "eu", queue_limit=0, in_flight_limit=1) as regions:
        us, eu = regions["us"], regions["eu"]
        go = asyncio.Event()

        eu.servers[0].answer = after(go)
        blocking = asyncio.ensure_future(eu.chat())
        await spin(lambda: eu.servers[0].open == 1)
        await regions.full("us")
        asking = asyncio.ensure_future(us.chat())
        await spin(lambda: us.gauge("forwarded_total", region="eu") >= 1)
        await spin(lambda: us.gauge("queue_requests") == 1)
        await regions.full("us", full=False)
        assert (await asking).status == 200
        assert regions.asked() == {"us": 1, "eu": 1}
        go.set()
        assert (await blocking).status == 200
        await regions.idle()


async def test_attempts_do_not_multiply_over_regions():
    async with running_upstream_regions("us", "eu", attempts=3) as regions:
        us, eu = regions["us"], regions["eu"]

        for bench in (us, eu):
            bench.servers[0].answer = says(DROP)
        assert (await us.chat()).status == 502
        assert sum(us.asked) + sum(eu.asked) <= 3


async def test_load_never_overrides_law(tmp_path):
    policy = tmp_path / "geography.json"
    policy.write_text(json.dumps({"regions": {"us": [], "eu": ["gdpr"]}, "tenants": {"acme": ["gdpr"]}}))
    keys = tmp_path / "keys"
    keys.write_text("k-acme acme\nk-other other\n")
    async with running_upstream_regions(
        "us", "eu", geography_file=str(policy), api_keys_file=str(keys), linked=False
    ) as regions:
        us, eu = regions["us"], regions["eu"]
        us.lb.regions.know([peer_of("eu", eu)])
        await regions.knows("us", "eu", room=True)
        acme, other = ({"authorization": f"Bearer k-{name}"} for name in ("acme", "other"))
        assert (await us.chat(headers=acme)).status == 200
        assert (await us.chat(headers=other | {"x-pinyon-geographies": "gdpr"})).status == 200
        assert regions.asked() == {"us": 0, "eu": 2}
        await regions.full("eu")
        await regions.knows("us", "eu", room=False)
        waiting = asyncio.ensure_future(us.chat(headers=acme))
        await spin(lambda: us.gauge("queue_requests") == 1)  # although there is room here
        assert (await us.chat(headers=other)).status == 200  # and it blocks no other request
        await regions.full("eu", full=False)
        assert (await waiting).status == 200
        assert regions.asked() == {"us": 1, "eu": 3}
        nowhere = await us.chat(headers=other | {"x-pinyon-geographies": "mars"})
        assert nowhere.status == 400
        await regions.idle()


async def test_law_is_looked_at_again_where_a_request_comes():
    """The sender has another policy by mistake."""
    async with running_upstream_regions("us", "eu") as regions:
        us, eu = regions["us"], regions["eu"]
        await regions.full("us")
        eu.lb.models.geography = parse_geography({
            "regions": {"us": [], "eu": []}, "tenants": {"public": ["us"]},
        })  # fmt: skip
        waiting = asyncio.ensure_future(us.chat())
        await spin(lambda: us.gauge("forwarded_total", region="eu") == 1)
        await spin(lambda: us.gauge("queue_requests") == 1)
        await regions.full("us", full=False)
        assert (await waiting).status == 200
        assert regions.asked() == {"us": 1, "eu": 0}
        await regions.idle()


async def test_a_region_that_is_known_and_was_not_heard_yet_may_come():
    async with running_upstream_regions("us", "eu", linked=False, placement_wait_s=0.2) as regions:
        us = regions["us"]
        us.lb.regions.know([peer_of("eu", regions["eu"]).__class__("lb-eu", "eu", "127.0.0.1:1")])
        assert (await us.chat(headers={"x-pinyon-geographies": "eu"})).status == 503
        assert (await us.chat(headers={"x-pinyon-geographies": "mars"})).status == 400
        await regions.idle()


async def test_requests_for_a_region_that_is_away_hold_up_nobody():
    async with running_upstream_regions(
        "us", linked=False, in_flight_limit=8, queue_limit=64, placement_wait_s=600.0
    ) as regions:
        us = regions["us"]
        us.lb.regions.know([PeerBalancer("lb-eu", "eu", "127.0.0.1:1")])
        away = [asyncio.ensure_future(us.chat(headers={"x-pinyon-geographies": "eu"})) for _ in range(16)]
        await spin(lambda: sum(each.done() for each in away) == 14)
        assert {(await each).status for each in away if each.done()} == {503}
        assert (await us.chat()).status == 200
        for each in away:
            each.cancel()
        await asyncio.gather(*away, return_exceptions=True)
