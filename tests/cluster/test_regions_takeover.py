"""The load balancer of a region is killed and stays away: another region's load balancer serves its instances."""

from __future__ import annotations

import time
from pathlib import Path

import pytest

from launch.regions import LocalRegions, RegionsSpec
from tests.cluster.regions_load import Load, ask, taken_by, until, value
from tests.cluster.specs import PACED, cluster_spec, start_again
from tests.forks import forked
from tests.long import usually

PATIENCE = ("--silence-s", "60", "--probe-timeout-s", "30", "--lease-s", "60")
"""Limits so long that only closed sessions and ports reveal a dead load balancer, never slowness."""


def adopters(regions: LocalRegions) -> dict[str, str]:
    return {each.region: each.adopter for each in regions.federation().clusters}


def connected(regions: LocalRegions) -> set[str]:
    return {each.info.region for each in regions.federation().members if each.connected}


@pytest.mark.parametrize("tls", [True, False][: usually(1, long=2)])
def test_the_nearest_one_serves_them_until_it_is_back(tmp_path: Path, tls: bool) -> None:
    spec = cluster_spec(
        **PACED, tls=tls,
        extra={"mixed": ("--max-batch", "4")},
    )  # fmt: skip
    delays = {"us:eu": 30.0, "ap:eu": 90.0, "us:ap": 60.0}
    with LocalRegions(
        RegionsSpec(("ap", "us", "eu"), spec, delays_ms=delays, controller_arguments=("--settle-s", "0.5", *PATIENCE)),
        tmp_path,
        forked,
    ) as regions:
        eu, us = regions.clusters["eu"], regions.clusters["us"]
        assert connected(regions) == {"ap", "eu", "us"}
        until(
            lambda: [len(each.latencies_ms) for each in regions.listed().reports.values()] == [2, 2, 2],
            "the round trips are not measured",
        )
        expected = ask(regions, "eu", 0)[0]
        eu.services["lb-0"].kill()
        until(lambda: adopters(regions).get("eu"), "nobody serves the instances of eu")
        assert adopters(regions) == {"ap": "", "us": "", "eu": "us-lb-0"}
        with Load(regions) as load:
            taken_by(regions, "eu")
            assert regions.controller is not None
            controller = regions.controller
            controller.kill()  # what the controller said last stays in force
            load.more()
            taken_by(regions, "eu")
            assert load.check()["eu"] == 0, "there is no load balancer of eu"
        controller.start_again()
        controller.wait_ready(time.monotonic() + 60)
        until(lambda: connected(regions) == {"ap", "us"}, "the controller does not hear them")
        assert adopters(regions)["eu"] == "us-lb-0"
        start_again(eu, "lb-0")
        until(lambda: adopters(regions).get("eu") == "", "it is not handed back")
        assert ask(regions, "eu", 0) == (expected, "eu")
        until(lambda: value(regions, "us", "pinyon_lb_in_flight_requests") == 0, "requests are left in us")
        assert us.services["lb-0"].alive
