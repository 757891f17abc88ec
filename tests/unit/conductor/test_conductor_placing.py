"""Requests as messages, and what a defect of ours costs."""

from __future__ import annotations

import time

from prometheus_client import CollectorRegistry

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.request import Role
from pinyon.placement.kvcache_centric import KvCacheCentric
from pinyon.placement.scheduler import Scheduler
from pinyon.runtime.telemetry import Telemetry
from services.conductor.membership import Membership
from services.conductor.metrics import ConductorMetrics
from services.conductor.placing import Placer
from tests.unit.placement.conftest import make_fleet


class Broken(KvCacheCentric):
    def place(self, request, pool, match, now_s, rng):
        if request.request_id == "bad":
            raise ZeroDivisionError("a secret")
        return super().place(request, pool, match, now_s, rng)


def test_a_defect_is_the_answer_to_one_request():
    fleet = make_fleet(("p0", Role.PREFILL), ("d0", Role.DECODE))
    registry = CollectorRegistry()
    metrics = ConductorMetrics(registry, fleet, Membership(fleet, time.monotonic, 3.0, 0.0))
    placer = Placer(
        Scheduler(fleet, Broken()), fleet.inflight, metrics, Telemetry("conductor", "c"), time.monotonic, 0.0, 0.0
    )
    answers = [
        placer.answer(conductor_pb2.ScheduleRequest(request_id=name, model="m", prompt_tokens=9))
        for name in ("a", "bad", "b")
    ]
    assert [answer.request_id for answer in answers] == ["a", "bad", "b"]
    assert [answer.error.code for answer in answers] == ["", "INTERNAL", ""]
    assert "secret" not in answers[1].error.message
    assert fleet.inflight.decodes == 2
    assert registry.get_sample_value("pinyon_conductor_placements_total", {"outcome": "internal"}) == 1
