"""Readiness of instances: whether they would serve a request now, for ``/health/ready`` and the gRPC health service.

While a conductor answers, its list counts, as it drops instances whose lease has ended. No conductor vouches for
instances while it is away, or has just started and not listed them yet: these are asked themselves.
"""

from __future__ import annotations

import asyncio
from collections.abc import Callable, Collection, Sequence
from typing import Any

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pinyon.core.clock import Clock
from pinyon.frontdoor.instances.clusters import Cluster
from pinyon.routing.pair import Candidate
from pinyon.runtime.channel import Channels
from pinyon.runtime.identity import WORKER, peer_name

ASK_EVERY_S = 1.0
ASK_EACH_S = 0.02
"""The time between two rounds grows by this for each instance that is asked: five hundred are asked every 11 s."""
ANSWER_S = 1.0
"""An instance that does not answer within this time counts as absent."""
ASKED_AT_ONCE = 64


class AskedInstances:
    """The instances of the region's own cluster, as :class:`pinyon.frontdoor.readiness.Watched`."""

    def __init__(
        self,
        models: Sequence[str],
        cluster: Cluster,
        channels: Channels,
        clock: Clock,
        elsewhere: Callable[[str], bool] = lambda model: False,
    ) -> None:
        """Watches ``models``; ``elsewhere`` returns whether other regions would serve a model."""
        self._models = models
        self._view, self._conductor = cluster.view, cluster.conductor
        self._channels = channels
        self._clock = clock
        self._elsewhere = elsewhere
        self._silent: frozenset[str] = frozenset()
        """The instances that were asked and did not say that they serve."""
        self._next_round_s = 0.0

    def lacks(self) -> str:
        missing = self.unserved()
        if len(missing) < len(self._models):
            return ""
        said = " ".join(missing.values())
        if not self._conductor.connected:
            said += " The conductor does not answer; the instances known from before were asked themselves."
        return said

    def unserved(self) -> dict[str, str]:
        now_s = self._clock()
        found = {model: self._view.lacks(model, now_s, self._silent) for model in self._models}
        return {model: why for model, why in found.items() if why and not self._elsewhere(model)}

    async def wait_change(self, timeout_s: float) -> None:
        await self._view.wait_change(timeout_s)

    async def look(self) -> None:
        """Asks the instances that no conductor vouches for, if it is time."""
        everyone = not self._conductor.connected
        asked = [each for model in self._models for each in self._view.unvouched(model, everyone=everyone)]
        if not asked:
            self._silent = frozenset()
            return
        now_s = self._clock()
        if now_s < self._next_round_s:
            return
        self._next_round_s = now_s + ASK_EVERY_S + ASK_EACH_S * len(asked)
        self._silent = await self._who_is_silent(asked)

    async def _who_is_silent(self, asked: Collection[Candidate]) -> frozenset[str]:
        places = asyncio.Semaphore(ASKED_AT_ONCE)

        async def ask(candidate: Candidate) -> bool:
            async with places:
                return await self._serves(candidate)

        answers = await asyncio.gather(*map(ask, asked))
        return frozenset(each.instance_id for each, serves in zip(asked, answers, strict=True) if not serves)

    async def _serves(self, candidate: Candidate) -> bool:
        async with self._channels.open(candidate.address, peer_name(WORKER, candidate.instance_id)) as channel:
            stub: Any = health_pb2_grpc.HealthStub(channel)
            try:
                reply = await stub.Check(health_pb2.HealthCheckRequest(), timeout=ANSWER_S)
            except grpc.aio.AioRpcError:
                return False
            return bool(reply.status == health_pb2.HealthCheckResponse.SERVING)
