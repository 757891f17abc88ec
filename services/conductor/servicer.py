"""The conductor's gRPC methods."""

from __future__ import annotations

import asyncio
from collections import deque
from collections.abc import AsyncGenerator
from dataclasses import dataclass, field
from typing import Any

from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.core.clock import Clock
from pinyon.core.errors import DeadlineExceeded, FailedPrecondition, InvalidArgument, NotFound, ResourceExhausted
from pinyon.messages.checks import check_keys, check_text
from pinyon.messages.enums import role_from_proto
from pinyon.messages.explanation import explained_to_proto
from pinyon.placement.decision_log import DecisionLog, LoggedDecision
from pinyon.placement.explanation import Explanation, explain
from pinyon.placement.fleet import Fleet
from pinyon.runtime.callers import Callers
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.identity import ADMIN, KVSTORE, LB, WORKER
from services.conductor.intake import ReportIntake
from services.conductor.listing import Listing
from services.conductor.membership import Membership
from services.conductor.metrics import ConductorMetrics
from services.conductor.placing import Placer
from services.conductor.sessions import LbStream, Placing, Reporting, ReportStream

CONDUCTOR_CALLERS: Callers = {
    # Placements are made in a tenant's name, and only load balancers know tenants.
    "Schedule": frozenset((LB,)),
    "ScheduleSession": frozenset((LB,)),
    "Release": frozenset((LB,)),
    # The servicer compares the registering instance's id and kind with those of the certificate.
    "ReportSession": frozenset((WORKER, KVSTORE)),
    "Explain": frozenset((LB, WORKER, ADMIN)),
    "ListInstances": frozenset((LB, WORKER, ADMIN)),
    "LookupBlocks": frozenset((LB, WORKER, ADMIN)),
}
FIRST_S = 10.0
"""The seconds after which a session ends if its peer has sent nothing at all: the number of sessions is limited."""
ASKED_CHARS_MAX = 256
"""The longest request id that is searched for: a client's own id and the suffix that pinyon adds."""
DECISIONS_MAX = 64


@dataclass(eq=False)
class ConductorServicer(conductor_pb2_grpc.ConductorServiceServicer):
    """The methods, each of which converts messages to values, asks a part, and converts its answer to a message."""

    fleet: Fleet
    membership: Membership
    listing: Listing
    intake: ReportIntake
    placer: Placer
    log: DecisionLog | None
    clock: Clock
    metrics: ConductorMetrics
    lb_sessions_max: int
    _lb_sessions: int = field(default=0, init=False)

    async def Schedule(self, request: conductor_pb2.ScheduleRequest, context: Any) -> conductor_pb2.ScheduleResponse:
        response = conductor_pb2.ScheduleResponse()
        self.placer.place(request, response)
        return response

    async def Release(self, request: conductor_pb2.ReleaseRequest, context: Any) -> conductor_pb2.ReleaseResponse:
        return conductor_pb2.ReleaseResponse(released=self.placer.release(request.request_id))

    async def ListInstances(
        self, request: conductor_pb2.ListInstancesRequest, context: Any
    ) -> conductor_pb2.ListInstancesResponse:
        role = role_from_proto(request.role)
        instances = self.listing.instances()
        if role is not None:
            instances = [each for each in instances if each.info.role == request.role]
        return conductor_pb2.ListInstancesResponse(
            version=self.fleet.version, instances=instances, incomplete=self.fleet.settling
        )

    async def LookupBlocks(
        self, request: conductor_pb2.LookupBlocksRequest, context: Any
    ) -> conductor_pb2.LookupBlocksResponse:
        packed_keys = check_keys(request.block_keys, "block_keys")
        match = self.fleet.index.match(packed_keys, every=self.fleet.common_sample)
        return conductor_pb2.LookupBlocksResponse(
            holders=[
                conductor_pb2.BlockHolder(instance_id=state.info.instance_id, prefix_blocks=blocks)
                for state in self.fleet.instances()
                if (blocks := match.held_by(state))
            ]
        )

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: Any) -> conductor_pb2.ExplainResponse:
        response = conductor_pb2.ExplainResponse()
        async for logged, explanation, age_s in explained(self.log, request.request_id, self.clock):
            response.decisions.append(explained_to_proto(logged, explanation, age_s))
        return response

    async def ReportSession(self, _: object, context: Any) -> None:
        stream: ReportStream = Accepted(context)
        session = Reporting(stream, context, self.intake, self.membership)
        silent = _end_if_silent(stream)
        try:
            await stream.run(session.take)
        finally:
            silent.cancel()
            session.close()

    async def ScheduleSession(self, _: object, context: Any) -> None:
        """Answers each message with one message, and pushes the instance list.

        A placement outlives its session, as its request may still run. It is ended by the instances' reports, by a
        release on any session, or by age."""
        if self._lb_sessions >= self.lb_sessions_max:
            raise ResourceExhausted(f"{self.lb_sessions_max} sessions are open", retry_after_s=1.0)
        stream: LbStream = Accepted(context)
        session = Placing(stream, self.placer)
        self._lb_sessions += 1
        self.metrics.lb_sessions.inc()
        silent = _end_if_silent(stream)
        try:
            await stream.run(session.take, self.listing.lists())
        finally:
            silent.cancel()
            self._lb_sessions -= 1
            self.metrics.lb_sessions.dec()


def _end_if_silent(stream: Accepted[Any, Any]) -> asyncio.TimerHandle:
    def look() -> None:
        if not stream.spoke:
            stream.end(DeadlineExceeded(f"no message came within {FIRST_S:g} s"))

    return asyncio.get_running_loop().call_later(FIRST_S, look)


async def explained(
    log: DecisionLog | None, request_id: str, clock: Clock
) -> AsyncGenerator[tuple[LoggedDecision, Explanation, float], None]:
    """Yields each decision about the request, its explanation and its age in seconds; other tasks run in between.

    Raises :class:`InvalidArgument` for a bad id, :class:`FailedPrecondition` if no decisions are kept (no ``log``), and
    :class:`NotFound` if there is none for this id."""
    if not request_id:
        raise InvalidArgument("must name a request", field="request_id")
    check_text(request_id, "request_id", ASKED_CHARS_MAX)
    if log is None:
        raise FailedPrecondition("this conductor remembers no placements (--explain-max 0)")
    found: deque[LoggedDecision] = deque(maxlen=DECISIONS_MAX)
    for part in log.search(request_id):
        found.extend(part)
        await asyncio.sleep(0)
    if not found:
        raise NotFound(
            f"no request {request_id[:128]!r} among the last {len(log)} that this conductor decided: it knows them by "
            "their x-request-id or the id of a completion, since its start, and forgets the oldest (--explain-max)"
        )
    for logged in found:
        yield logged, explain(logged), clock() - logged.at_s
        await asyncio.sleep(0)
