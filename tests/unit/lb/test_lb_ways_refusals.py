"""Another region's reports after it has refused a request."""

from __future__ import annotations

from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.target import Report

ROOM = Report(pending=0, room=4, available=2)


class Clock:
    now_s = 0.0

    def __call__(self) -> float:
        return self.now_s


def available(ways: ServedModels) -> bool:
    """Returns whether the other region is available after it has just reported room."""
    ways.heard("lb-eu", "eu", {"m": ROOM}, 0.05, draining=False)
    (_, other) = ways.dry_run(ways.of("m"), (), "")
    return other.available


def test_a_region_that_keeps_refusing_is_asked_less_and_less():
    clock = Clock()
    ways = ServedModels("us", clock, pushing="pending", own=["m"])
    asked = 0
    for tick in range(600):
        clock.now_s = tick / 10
        if available(ways):
            asked += 1
            ways.refused("m", "lb-eu")
            (_, other) = ways.dry_run(ways.of("m"), (), "")
            assert not other.available
    assert asked < 30
    clock.now_s += 4.0
    assert available(ways)
    ways.refused("m", "lb-eu")
    assert not available(ways)
    ways.accepted("lb-eu", clock.now_s + 0.01)
    assert available(ways), "a request that it serves ends the pause"
    ways.refused("m", "lb-eu")
    ways.gone("lb-eu")
    assert available(ways), "it may be another one"
