"""Requests that may wait for an instance to come, and hold a slot meanwhile."""

from __future__ import annotations

import asyncio

import pytest
from prometheus_client import CollectorRegistry

from pinyon.core.errors import PinyonError, Unavailable
from pinyon.core.request import RequestClass, SamplingParams
from pinyon.frontdoor.instances.request import Request, Terms
from pinyon.frontdoor.line import Line
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.request_loop import SHARE, LoopLimits, RequestLoop
from pinyon.frontdoor.served_models import ServedModels
from pinyon.routing.queue import RequestQueue
from pinyon.routing.target_policy import Routed
from pinyon.routing.two_layers import RoutingChoice
from pinyon.runtime.telemetry import Telemetry


class Away:
    """The kind of targets of which none comes."""

    def queues(self, flight: Request) -> bool:
        return False

    def gives_up(self, flight: Request) -> bool:
        return False

    async def place(self, flight: Request, choice: RoutingChoice) -> PinyonError:
        return Unavailable("away")

    async def wait_change(self, flight: Request, timeout_s: float) -> None:
        await asyncio.Event().wait()


async def test_those_who_chose_regions_hold_a_share_of_the_slots() -> None:
    models = ServedModels("us", lambda: 0.0, own=["m"])
    metrics, limits = DoorMetrics(CollectorRegistry(), Line(RequestQueue(1, 1))), LoopLimits(slots=3 * SHARE)
    loop = RequestLoop(models, Away(), metrics, Telemetry("lb", "lb"), limits, lambda: 0.0)

    async def seek(*geographies: str) -> asyncio.Task[None]:
        request = Request("id", "m", RequestClass(), bytes(8), b"", SamplingParams(5), Terms(0.0, 10.0))
        request.depart(models.of("m"), Routed(), geographies, "t")
        task = asyncio.ensure_future(loop._place(request, None))
        await asyncio.wait({task}, timeout=0)
        return task

    everyone = [await seek() for _ in range(20)]
    chosen = [await seek("us") for _ in range(3)]
    for _ in range(10):
        with pytest.raises(Unavailable, match="many wait"):
            await (await seek("us"))
        everyone.append(await seek())
        chosen[0].cancel()
        await asyncio.wait({chosen.pop(0)})
        chosen.append(await seek("us"))
    assert not any(each.done() for each in (*everyone, *chosen))
    for each in (*everyone, *chosen):
        each.cancel()
