"""Requests as messages, and the cost of a defect in pinyon."""

from __future__ import annotations

import time

import pytest
from prometheus_client import CollectorRegistry

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.request import Role
from pinyon.placement.dualmap import DualMap
from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.policy import Move
from pinyon.placement.scheduler import Scheduler
from pinyon.runtime.telemetry import Telemetry
from services.conductor.membership import Membership
from services.conductor.metrics import ConductorMetrics
from services.conductor.placing import MOVES_EVERY_S, MOVES_NONE_S, Placer
from tests.on_compiled import REPLACES_METHODS
from tests.unit.placement.conftest import make_fleet


class Broken(KvCacheCentric):
    def place(self, request, pool, match, now_s, rng):
        if request.request_id == "bad":
            raise ZeroDivisionError("a secret")
        return super().place(request, pool, match, now_s, rng)


def answered(placer: Placer, name: str) -> conductor_pb2.ScheduleResponse:
    response = conductor_pb2.ScheduleResponse()
    placer.answer(conductor_pb2.ScheduleRequest(request_id=name, model="m", prompt_tokens=9), response)
    return response


@REPLACES_METHODS
def test_a_defect_is_the_answer_to_one_request():
    fleet = make_fleet(("p0", Role.PREFILL), ("d0", Role.DECODE))
    registry = CollectorRegistry()
    metrics = ConductorMetrics(registry, fleet, Membership(fleet, time.monotonic, 3.0, 0.0))
    placer = Placer(Scheduler(fleet, Broken()), fleet.inflight, metrics, Telemetry("conductor", "c"), time.monotonic)
    answers = [answered(placer, name) for name in ("a", "bad", "b")]
    assert [answer.request_id for answer in answers] == ["a", "bad", "b"]
    assert [answer.error.code for answer in answers] == ["", "INTERNAL", ""]
    assert "secret" not in answers[1].error.message
    assert fleet.inflight.decodes == 2
    assert registry.get_sample_value("pinyon_conductor_placements_total", {"outcome": "internal"}) == 1


class Moving(DualMap):
    """A policy that wants the same move at each request, or no move, or has a defect."""

    asked = 0
    finds = "one"

    def moves(self, request, decision, waiting):
        self.asked += 1
        if self.finds == "a defect":
            raise ZeroDivisionError
        return [Move(request, decision.prefill, decision.alternate)] if self.finds == "one" else []


@REPLACES_METHODS
@pytest.mark.parametrize(
    ("finds", "every_s", "asked", "counted"),
    [
        ("one", MOVES_EVERY_S, 3, 3.0),
        ("nothing", MOVES_EVERY_S, 10, 0.0),
        ("nothing", MOVES_NONE_S, 3, 0.0),
        ("a defect", MOVES_NONE_S, 3, 0.0),
    ],
)
def test_wanted_moves_are_counted_rarely_and_cost_no_request(finds, every_s, asked, counted):
    fleet = make_fleet(("p0", Role.MIXED), ("p1", Role.MIXED))
    registry, policy, now_s = CollectorRegistry(), Moving(), [0.0]
    policy.finds = finds
    metrics = ConductorMetrics(registry, fleet, Membership(fleet, lambda: now_s[0], 3.0, 0.0))
    scheduler = Scheduler(fleet, policy)
    placer = Placer(scheduler, fleet.inflight, metrics, Telemetry("conductor", "c"), lambda: now_s[0])
    for number in range(10):
        now_s[0] = number * every_s / 4
        assert answered(placer, f"r{number}").HasField("placement")
    assert registry.get_sample_value("pinyon_conductor_moves_wanted_total") == counted
    assert policy.asked == asked
