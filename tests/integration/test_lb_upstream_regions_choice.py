"""The region that serves a request, for our instances or other makers' servers: by room, by law, forwarded once."""

from __future__ import annotations

import asyncio
import json

import pytest

from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.routing.geography import parse_geography
from tests.integration.lb_harness import spin
from tests.integration.regions_harness import peer_of, running_regions
from tests.integration.upstream_parts import DROP, says
from tests.integration.upstream_regions_parts import running_upstream_regions

BOTH = pytest.mark.parametrize("running", [running_regions, running_upstream_regions], ids=["tokens", "HTTP"])


@BOTH
async def test_nothing_is_forwarded_twice(running):
    """A request forwarded to a region that is full by then waits there, although a third region has room."""
    async with running("us", "eu", "ap") as regions:
        us, eu = regions["us"], regions["eu"]
        us.lb.models.use(geography=parse_geography({
            "regions": {"us": [], "eu": [], "ap": []}, "rules": [{"from": ["us"], "to": ["eu"]}],
        }))  # fmt: skip
        await regions.full("us")
        for session in eu.lb.serving.sessions:  # they repeat an old state: `us` does not hear that it is full by now
            state = session._now()
            session._now = lambda state=state: state
        await regions.full("eu")
        asking = asyncio.ensure_future(regions.ask("us"))
        await spin(lambda: eu.gauge("queue_requests") == 1)
        assert regions.asked() == {"us": 0, "eu": 0, "ap": 0}
        assert regions["ap"].gauge("in_flight_requests") == 0
        await regions.full("eu", full=False)
        assert (await asking).status == 200
        assert regions.asked() == {"us": 0, "eu": 1, "ap": 0}
        await regions.idle()


@BOTH
async def test_a_request_refused_elsewhere_is_put_back_and_served_home(running):
    async with running("us", "eu", queue_limit=0, in_flight_limit=1) as regions:
        us = regions["us"]
        blocking, go = await regions.held("eu")
        await regions.full("us")
        asking = asyncio.ensure_future(regions.ask("us"))
        await spin(lambda: (us.registry.get_sample_value("pinyon_lb_forwarded_total", {"region": "eu"}) or 0) >= 1)
        await spin(lambda: us.gauge("queue_requests") == 1)
        await regions.full("us", full=False)
        assert (await asking).status == 200
        assert regions.asked() == {"us": 1, "eu": 1}
        go()
        assert (await blocking).status == 200
        await regions.idle()


@BOTH
async def test_load_never_overrides_law(tmp_path, running):
    policy, keys = tmp_path / "geography.json", tmp_path / "keys"
    policy.write_text(json.dumps({"regions": {"us": [], "eu": ["gdpr"]}, "tenants": {"acme": ["gdpr"]}}))
    keys.write_text("k-acme acme\nk-other other\n")
    async with running("us", "eu", geography_file=str(policy), api_keys_file=str(keys), linked=False) as regions:
        us = regions["us"]
        us.lb.regions.know([peer_of("eu", regions["eu"])])
        await regions.knows("us", "eu", room=True)
        acme, other = ({"authorization": f"Bearer k-{name}"} for name in ("acme", "other"))
        assert (await regions.ask("us", acme)).status == 200
        assert (await regions.ask("us", other | {"x-pinyon-geographies": "gdpr"})).status == 200
        assert regions.asked() == {"us": 0, "eu": 2}
        await regions.full("eu")
        await regions.knows("us", "eu", room=False)
        waiting = asyncio.ensure_future(regions.ask("us", acme))
        await spin(lambda: us.gauge("queue_requests") == 1)  # although there is room here
        assert (await regions.ask("us", other)).status == 200  # and it blocks no other request
        await regions.full("eu", full=False)
        assert (await waiting).status == 200
        assert regions.asked() == {"us": 1, "eu": 3}
        nowhere = await regions.ask("us", other | {"x-pinyon-geographies": "mars"})
        assert nowhere.status == 400
        assert "may be served in mars only" in nowhere.json["error"]["message"]
        await regions.idle()


@BOTH
async def test_a_region_that_is_known_and_was_not_heard_yet_may_come(running):
    async with running("us", linked=False, placement_wait_s=0.3) as regions:
        regions["us"].lb.regions.know([PeerBalancer("lb-eu", "eu", "127.0.0.1:1")])
        assert (await regions.ask("us", {"x-pinyon-geographies": "eu"})).status == 503
        assert (await regions.ask("us", {"x-pinyon-geographies": "mars"})).status == 400
        await regions.idle()


async def test_attempts_do_not_multiply_over_regions():
    async with running_upstream_regions("us", "eu", attempts=3) as regions:
        us, eu = regions["us"], regions["eu"]

        for bench in (us, eu):
            bench.servers[0].answer = says(DROP)
        assert (await us.chat()).status == 502
        assert sum(us.asked) + sum(eu.asked) <= 3


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
