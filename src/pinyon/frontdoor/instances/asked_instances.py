"""Readiness of instances: whether they would serve a request now, for ``/health/ready`` and the gRPC health service.

While a conductor answers, its list counts, as it drops instances whose lease has ended. No conductor vouches for
instances while it is away, or has just started and not listed them yet: these are asked themselves."""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection
from dataclasses import dataclass
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pinyon.core.clock import Clock
from pinyon.frontdoor.instances.instances import ConductorCluster
from pinyon.routing.pair import PairCandidate
from pinyon.runtime.channel import Channels
from pinyon.runtime.identity import WORKER, peer_name

ASK_EVERY_S = 1.0
ASK_EACH_S = 0.02
"""The time between two rounds grows by this for each instance that is asked: five hundred are asked every 11 s."""
ANSWER_S = 1.0
"""An instance that does not answer within this time counts as absent."""
ASKED_AT_ONCE = 64


@dataclass(slots=True, eq=False)
class AskedInstances:
    """The instances of the region's own cluster, as :class:`pinyon.frontdoor.readiness.Watched`."""

    models: Collection[str]
    cluster: ConductorCluster
    channels: Channels
    clock: Clock
    elsewhere: Callable[[str], bool]
    """Returns whether other regions would serve a model."""
    silent: frozenset[str] = frozenset()
    """The instances that were asked and did not say that they serve."""
    next_round_s: float = 0.0

    def lacks(self) -> str:
        missing = self.unserved()
        if len(missing) < len(self.models):
            return ""
        said = " ".join(missing.values())
        if not self.cluster.conductor.connected:
            said += " The conductor does not answer; the instances known from before were asked themselves."
        return said

    def unserved(self) -> dict[str, str]:
        now_s = self.clock()
        found = {model: self.cluster.lacks(model, now_s, self.silent) for model in self.models}
        return {model: why for model, why in found.items() if why and not self.elsewhere(model)}

    async def wait_change(self, timeout_s: float) -> None:
        await self.cluster.wait_change(timeout_s)

    async def look(self) -> None:
        """Asks the instances that no conductor vouches for, if it is time."""
        everyone = not self.cluster.conductor.connected
        asked = [each for model in self.models for each in self.cluster.unvouched(model, everyone=everyone)]
        if not asked:
            self.silent = frozenset()
            return
        now_s = self.clock()
        if now_s < self.next_round_s:
            return
        self.next_round_s = now_s + ASK_EVERY_S + ASK_EACH_S * len(asked)
        self.silent = await self._who_is_silent(asked)

    async def _who_is_silent(self, asked: Collection[PairCandidate]) -> frozenset[str]:
        places = asyncio.Semaphore(ASKED_AT_ONCE)

        async def serves(candidate: PairCandidate) -> bool:
            name = peer_name(WORKER, candidate.instance_id)
            async with places, self.channels.open(candidate.address, name) as channel:
                stub: Any = health_pb2_grpc.HealthStub(channel)
                try:
                    reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
                except grpc.aio.AioRpcError:
                    return False
                return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)

        answers = await asyncio.gather(*map(serves, asked))
        return frozenset(each.instance_id for each, there in zip(asked, answers, strict=True) if not there)
