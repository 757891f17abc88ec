"""Another region's word after it has refused what it was sent."""

from __future__ import annotations

from pinyon.core.request import RequestClass, SamplingParams
from pinyon.frontdoor.instances.request import Ask, Request
from pinyon.frontdoor.instances.ways import Ways
from pinyon.frontdoor.ways_options import WaysOptions
from pinyon.routing.target import Report

ROOM = Report(pending=0, room=4, available=2)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def available(ways: Ways) -> bool:
    """It has said just now that it has room."""
    ways.heard("lb-eu", "eu", {"m": ROOM}, 0.05, draining=False)
    (_, other) = ways.dry_run("m", (), "")
    return other.available


def test_a_region_that_refuses_whatever_it_says_is_asked_less_and_less():
    clock = Clock()
    ways = Ways(["m"], WaysOptions(region="us", pushing="pending"), clock)
    request = Request(Ask("r", "m", RequestClass(), b"", b"", SamplingParams(1)), 0.0, 1.0)
    asked = 0
    for tick in range(600):
        clock.now_s = tick / 10
        if available(ways):
            asked += 1
            ways.refused(request, "lb-eu")
            (_, other) = ways.dry_run("m", (), "")
            assert not other.available
    assert asked < 30
    clock.now_s += 4.0
    assert available(ways)
    ways.refused(request, "lb-eu")
    assert not available(ways)
    ways.accepted("lb-eu", clock.now_s + 0.01)
    assert available(ways), "a request that it serves ends the pause"
    ways.refused(request, "lb-eu")
    ways.gone("lb-eu")
    assert available(ways), "it may be another one"
