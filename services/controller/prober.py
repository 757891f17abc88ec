"""Probes of load balancers, beside their sessions: gRPC's health service at their address says whether they serve."""

from __future__ import annotations

import asyncio
from collections.abc import Callable
from dataclasses import dataclass, field

import grpc
from grpc_health.v1 import health_pb2, health_pb2_grpc

from pinyon.api.lb.v1 import peer_pb2
from pinyon.core.clock import Clock
from pinyon.federation.registry import LbRegistry
from pinyon.federation.view import LbInfo
from pinyon.runtime.channel import Channels
from pinyon.runtime.identity import LB, peer_name
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

SUSPECTED_PERIOD_S = 0.25
FAILED_PERIOD_S = 1.0
PERIOD_S = 5.0
AT_ONCE = 64
"""The maximum number of probes at once. Waiting costs the others nothing: a probe begins when it is sent."""
SERVICE = peer_pb2.DESCRIPTOR.services_by_name["PeerService"].full_name
"""A service of all load balancers, unknown to any other process that may have taken the port."""

_log = get_logger("controller.prober")


@dataclass(slots=True)
class _Probe:
    task: asyncio.Task[None] | None = None
    ended_s: float = float("-inf")
    answered: bool = False


@dataclass(slots=True, eq=False)
class Prober:
    """The prober: ``look`` now and then → ``close``. ``told`` is called after each new answer, and each missing one."""

    registry: LbRegistry
    channels: Channels
    timeout_s: float
    clock: Clock
    told: Callable[[], None]
    counted: Callable[[bool], None]
    _probes: dict[str, _Probe] = field(default_factory=dict, init=False)
    _turns: asyncio.Semaphore = field(default_factory=lambda: asyncio.Semaphore(AT_ONCE), init=False)

    def look(self) -> None:
        """Begins the probes that are due."""
        now_s = self.clock()
        members = {each.info.lb_id: each for each in self.registry.watched() if not each.left}
        for lb_id in [each for each in self._probes if each not in members]:
            probe = self._probes.pop(lb_id)
            if probe.task is not None:
                probe.task.cancel()
        for lb_id, member in members.items():
            probe = self._probes.setdefault(lb_id, _Probe())
            if probe.task is not None and not probe.task.done():
                continue
            period_s = PERIOD_S
            if member.failed:
                period_s = FAILED_PERIOD_S
            elif member.suspected(now_s, self.registry.timing):
                period_s = SUSPECTED_PERIOD_S
            if now_s - probe.ended_s >= period_s:
                probe.task = asyncio.create_task(self._run(probe, member.info), name=f"probe {lb_id}")

    async def close(self) -> None:
        probes = list(self._probes.values())
        self._probes.clear()
        await ended(*[each.task for each in probes])

    async def _run(self, probe: _Probe, info: LbInfo) -> None:
        async with self._turns:
            began_s = self.clock()
            answered = await self._ask(info)
        probe.ended_s = self.clock()
        self.counted(answered)
        self.registry.probed(info.lb_id, info.boot_id, answered, began_s, probe.ended_s)
        if not answered or not probe.answered:
            self.told()
        probe.answered = answered

    async def _ask(self, info: LbInfo) -> bool:
        """Returns whether the load balancer answers, and so is alive; its reports say whether it is ready."""
        channel = self.channels.open(info.grpc_address, peer_name(LB, info.lb_id))
        try:
            await health_pb2_grpc.HealthStub(channel).Check(
                health_pb2.HealthCheckRequest(service=SERVICE), timeout=self.timeout_s
            )
        except grpc.aio.AioRpcError as error:
            _log.debug("%s at %s: %s", info.lb_id, info.grpc_address, error.details())
            return False
        finally:
            await channel.close(None)
        return True
