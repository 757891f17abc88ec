"""Three regions under load with faults in one of them: nothing hangs, and every answer is right."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from launch.regions import LocalRegions, RegionsSpec
from tests.cluster.regions_load import Load, taken_by, until, value
from tests.cluster.specs import PACED, cluster_spec, frozen, start_again
from tests.forks import forked


@pytest.fixture
def regions(tmp_path: Path) -> Iterator[LocalRegions]:
    spec = cluster_spec(
        **PACED, extra={"worker": ("--max-batch", "4"), "mixed": ("--max-batch", "4"), "lb": ("--pushing", "pending")},
    )  # fmt: skip
    with LocalRegions(RegionsSpec(("us", "eu", "ap"), spec, region_delay_ms=20.0), tmp_path, forked) as regions:
        yield regions


def test_overflow_goes_elsewhere_and_a_killed_lb_loses_nothing(regions: LocalRegions) -> None:
    with Load(regions) as load:
        taken_by(regions, "eu")
        regions.clusters["eu"].services["lb-0"].kill()
        assert load.more()["eu"] == 0
        taken_by(regions, "us")
        taken_by(regions, "ap")
        start_again(regions.clusters["eu"], "lb-0")
        until(lambda: value(regions, "eu", "pinyon_lb_accepted_total") >= 2, "it takes nothing when it is back")
        served = load.check()
    assert min(served[name] for name in ("us", "eu", "ap")) > 0
    until(lambda: value(regions, "us", "pinyon_lb_in_flight_requests") == 0, "requests are left in us")


def test_a_frozen_load_balancer_is_left_behind(regions: LocalRegions) -> None:
    with Load(regions) as load:
        taken_by(regions, "eu")
        victim = regions.clusters["eu"].services["lb-0"]
        with frozen(victim):
            load.more()
            load.check()
    until(lambda: value(regions, "eu", "pinyon_lb_in_flight_requests") == 0, "requests are left in eu")


def test_a_region_that_is_cut_off(regions: LocalRegions) -> None:
    """The region's processes are stopped: it gives no answer and closes no connection."""
    with Load(regions) as load:
        taken_by(regions, "ap")
        with frozen(*regions.clusters["ap"].services.values()):
            load.more()
            load.check()


def test_an_instance_killed_in_mid_stream(regions: LocalRegions) -> None:
    with Load(regions) as load:
        taken_by(regions, "us")
        regions.clusters["us"].services["mixed-0"].kill()
        assert load.more()["us"] == 0
        start_again(regions.clusters["us"], "mixed-0")
        taken_by(regions, "us")
        load.check()  # also of the requests that it had begun


def test_law_holds_whatever_fails(tmp_path: Path) -> None:
    policy = tmp_path / "geography.json"
    spec = cluster_spec(
        **PACED,
        extra={"mixed": ("--max-batch", "4"), "lb": ("--geography-file", str(policy))},
    )  # fmt: skip
    law = {
        "regions": {"us": [], "eu": ["gdpr"], "uk": ["gdpr"]},
        "rules": [{"from": ["gdpr"], "to": ["gdpr"]}, {"from": ["us"], "to": ["us"]}],
    }
    policy.write_text(json.dumps(law))
    several = RegionsSpec(
        ("eu", "uk", "us"), spec, region_delay_ms=20.0, controller_arguments=("--geography", str(policy))
    )
    with LocalRegions(several, tmp_path, forked) as regions:
        with Load(regions, "eu", may_fail=True) as load:
            taken_by(regions, "uk")
            regions.clusters["uk"].services["lb-0"].kill()
            regions.clusters["eu"].services["mixed-0"].kill()
            regions.clusters["eu"].services["mixed-0"].start_again()
            load.more()
            assert load.check()["us"] == 0
        assert value(regions, "us", "pinyon_worker_generated_tokens_total") == 0
