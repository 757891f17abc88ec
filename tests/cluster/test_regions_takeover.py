"""The load balancer of a region is killed and stays away: its instances serve on through another region's."""

from __future__ import annotations

import signal
from pathlib import Path

import pytest

from pinyon.federation.members import LbState
from services.regions import LocalRegions, RegionsSpec
from tests.cluster.regions_load import Load, ask, taken_by, until, value
from tests.cluster.specs import cluster_spec
from tests.forks import forked
from tests.long import usually


def adopters(regions: LocalRegions) -> dict[str, str]:
    return {each.region: each.adopter for each in regions.federation().clusters}


def states(regions: LocalRegions) -> dict[str, LbState]:
    return {each.info.region: each.state for each in regions.federation().members}


@pytest.mark.parametrize("tls", [True, False][: usually(1, long=2)])
def test_the_nearest_one_serves_them_until_it_is_back(tmp_path: Path, tls: bool) -> None:
    spec = cluster_spec(
        prefill=0, decode=0, mixed=1, stores=0, engine="paced", engine_profile="tiny", pool_blocks=256, tls=tls,
        extra={"mixed": ("--max-batch", "4")},
    )  # fmt: skip
    delays = {"us:eu": 30.0, "ap:eu": 90.0, "us:ap": 60.0}
    with LocalRegions(
        RegionsSpec(
            ("ap", "us", "eu"), spec, delays_ms=delays, controller_arguments=("--settle-s", "0.5", "--grace-s", "0")
        ),
        tmp_path,
        forked,
    ) as regions:
        eu, us = regions.clusters["eu"], regions.clusters["us"]
        assert sorted(states(regions)) == ["ap", "eu", "us"]
        until(
            lambda: [len(each.latencies_ms) for each in regions.listed().reports.values()] == [2, 2, 2],
            "the round trips are not measured",
        )
        load = Load(regions)
        victim = eu.services["lb-0"]
        victim.signal(signal.SIGKILL)
        victim.wait(10)
        until(lambda: adopters(regions)["eu"] != "", "nobody serves the instances of eu")
        assert adopters(regions) == {"ap": "", "us": "", "eu": "us-lb-0"}
        load.send(60)
        taken_by(regions, "eu")
        assert regions.controller is not None
        controller = regions.controller.services["controller"]
        controller.signal(signal.SIGKILL)  # what was told last goes on to count
        controller.wait(10)
        load.send(20)
        assert "eu" not in load.check(), "there is no load balancer of eu"
        regions.controller.restart()
        until(lambda: list(states(regions).values()).count(LbState.LIVE) == 2, "the controller does not hear them")
        assert adopters(regions)["eu"] == "us-lb-0"
        eu.restart("lb-0")
        until(lambda: adopters(regions)["eu"] == "", "it is not handed back")
        assert ask(regions, "eu", 0) == (load.expected[0], "eu")
        until(lambda: value(regions, "us", "pinyon_lb_in_flight_requests") == 0, "requests are left in us")
        assert us.services["lb-0"].alive
