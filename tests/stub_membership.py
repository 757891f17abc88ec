"""The membership of a load balancer that consists only of its session with the controller."""

from __future__ import annotations

import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

from pinyon.api.controller.v1 import controller_pb2
from pinyon.core.clock import Clock
from pinyon.federation.view import Federation
from pinyon.frontdoor.regions.membership import RegionMembership
from pinyon.runtime.channel import open_session


class StubMembership(RegionMembership):
    """A membership that hands each federation to ``told``, and reports what its attributes say."""

    def __init__(
        self, address: str, lb_id: str, told: Callable[[Federation], object], clock: Clock = time.monotonic, **options
    ) -> None:
        nothing: Any = SimpleNamespace(own=SimpleNamespace(name=lb_id), links=(), adopt=lambda wanted: None)
        self.ready = SimpleNamespace(draining=False)
        super().__init__(address, *[nothing] * 5, self.ready, open_session, clock, **options)
        self.told = told
        self.load_now = controller_pb2.LoadBalancerLoad()
        self.latencies_now: dict[str, float] = {}

    def load(self) -> controller_pb2.LoadBalancerLoad:
        return self.load_now

    def latencies_ms(self) -> dict[str, float]:
        return self.latencies_now
