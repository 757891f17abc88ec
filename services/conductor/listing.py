"""The list of instances for load balancers and operators."""

from __future__ import annotations

from collections.abc import AsyncGenerator, Awaitable, Callable

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.clock import Clock
from pinyon.messages.instance import instance_to_proto
from pinyon.placement.fleet import Fleet
from pinyon.placement.instances import InstanceState
from services.conductor.membership import Membership

GAP_S = 0.05
"""The least time between two lists for one load balancer, so that changes close together travel together."""
FRESH_S = 0.5
"""The greatest age of the loads in a list that a load balancer gets."""


class Listing:
    """The builder of instance lists; a list is built once, however many load balancers get it."""

    def __init__(
        self, fleet: Fleet, membership: Membership, clock: Clock, sleep: Callable[[float], Awaitable[None]]
    ) -> None:
        self._fleet = fleet
        self._membership = membership
        self._clock = clock
        self._sleep = sleep
        self._built: conductor_pb2.ScheduleSessionResponse | None = None
        self._built_s = 0.0

    def instances(self) -> list[conductor_pb2.Instance]:
        """Returns all live instances as of now, ordered by id."""
        return [self._instance(state) for state in self._fleet.instances()]

    async def lists(self) -> AsyncGenerator[conductor_pb2.ScheduleSessionResponse, None]:
        """Yields the list for one load balancer, and again after each change."""
        while True:
            message = self._latest()
            yield message
            await self._sleep(GAP_S)
            await self._membership.wait_change(message.instances.version)

    def _latest(self) -> conductor_pb2.ScheduleSessionResponse:
        built, now_s = self._built, self._clock()
        if built is not None and built.instances.version == self._fleet.version and now_s - self._built_s < FRESH_S:
            return built
        settling = self._fleet.settling
        # While the fleet settles, an instance without a session is left out: load balancers that know it must keep it.
        states = [state for state in self._fleet.instances() if state.connected or not settling]
        self._built_s = now_s
        self._built = conductor_pb2.ScheduleSessionResponse(
            instances=conductor_pb2.InstanceList(
                version=self._fleet.version, instances=[self._instance(state) for state in states], incomplete=settling
            )
        )
        return self._built

    def _instance(self, state: InstanceState) -> conductor_pb2.Instance:
        report_age_s = self._membership.report_age_s(state.info.instance_id)
        return instance_to_proto(state, self._fleet.index.blocks_of(state), report_age_s)
