"""A tenant's tokens per minute: taken with a request's place, and given back as far as they were not used."""

from __future__ import annotations

from typing import Any

import pytest
from prometheus_client import CollectorRegistry

from pinyon.frontdoor.admission import RateLimited, TenantAdmission
from pinyon.frontdoor.auth import Client
from pinyon.frontdoor.line import Line
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.routing.queue import RequestQueue
from pinyon.routing.rates import Rates, TenantRates


@pytest.fixture
async def admission() -> TenantAdmission:
    line = Line(RequestQueue(10, 10))
    metrics: DoorMetrics[Any] = DoorMetrics(CollectorRegistry(), line)
    return TenantAdmission(line, TenantRates(), Rates(0, 100), metrics, lambda: 0.0)


async def test_who_is_refused_gives_no_tokens_back(admission: TenantAdmission) -> None:
    client = Client("t")
    with admission.admit(client) as first:
        assert first.enter(100)
        for _ in range(3):
            with admission.admit(client) as second, pytest.raises(RateLimited):
                second.enter(50)
        first.leave(used_tokens=70)
    with admission.admit(client) as third:
        assert third.enter(30)
        with admission.admit(client) as fourth, pytest.raises(RateLimited):
            fourth.enter(1)
