"""The conductor's gRPC methods."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence
from functools import partial
from typing import Any

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2, conductor_pb2_grpc
from pinyon.core.errors import DeadlineExceeded, ResourceExhausted
from pinyon.messages.checks import check_keys
from pinyon.messages.role import role_from_proto
from pinyon.placement.fleet import Fleet
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.identity import KVSTORE, WORKER, check_claim
from services.conductor.explaining import Explainer
from services.conductor.intake import ReportIntake
from services.conductor.listing import Listing
from services.conductor.membership import Membership, Reporter
from services.conductor.metrics import ConductorMetrics
from services.conductor.placing import Placer
from services.conductor.turns import now_or_in_turns

__all__ = ["ConductorServicer"]

_LbStream = Accepted[conductor_pb2.ScheduleSessionResponse, conductor_pb2.ScheduleSessionRequest]

WRITE_S = 5.0
"""A session whose peer takes no message for this long has ended."""
FIRST_S = 10.0
"""A session whose peer says nothing at all for this long has ended: there is room for so many."""
REQUESTS_PER_TURN = 64
RELEASES_PER_TURN = 4096
"""Of a message that brings more, others get the loop in between."""


class ConductorServicer(conductor_pb2_grpc.ConductorServiceServicer):
    """Messages to values, ask, values to messages."""

    def __init__(
        self,
        fleet: Fleet,
        membership: Membership,
        listing: Listing,
        intake: ReportIntake,
        placer: Placer,
        explainer: Explainer,
        metrics: ConductorMetrics,
        lb_sessions_max: int,
    ) -> None:
        self._fleet = fleet
        self._membership = membership
        self._listing = listing
        self._intake = intake
        self._placer = placer
        self._explainer = explainer
        self._metrics = metrics
        self._lb_sessions_max = lb_sessions_max
        self._lb_sessions = 0

    async def Schedule(self, request: conductor_pb2.ScheduleRequest, context: Any) -> conductor_pb2.ScheduleResponse:
        response = conductor_pb2.ScheduleResponse()
        self._placer.place(request, response)
        return response

    async def Release(self, request: conductor_pb2.ReleaseRequest, context: Any) -> conductor_pb2.ReleaseResponse:
        return conductor_pb2.ReleaseResponse(released=self._placer.release(request.request_id))

    async def ListInstances(
        self, request: conductor_pb2.ListInstancesRequest, context: Any
    ) -> conductor_pb2.ListInstancesResponse:
        role = role_from_proto(request.role)
        instances = self._listing.instances()
        if role is not None:
            instances = [each for each in instances if each.info.role == request.role]
        return conductor_pb2.ListInstancesResponse(
            version=self._fleet.version, instances=instances, incomplete=self._fleet.settling
        )

    async def LookupBlocks(
        self, request: conductor_pb2.LookupBlocksRequest, context: Any
    ) -> conductor_pb2.LookupBlocksResponse:
        packed_keys = check_keys(request.block_keys, "block_keys")
        match = self._fleet.index.match(packed_keys, every=self._fleet.common_sample)
        return conductor_pb2.LookupBlocksResponse(
            holders=[
                conductor_pb2.BlockHolder(instance_id=state.info.instance_id, prefix_blocks=blocks)
                for state in self._fleet.instances()
                if (blocks := match.held_by(state))
            ]
        )

    async def Explain(self, request: conductor_pb2.ExplainRequest, context: Any) -> conductor_pb2.ExplainResponse:
        return await self._explainer.explain(request.request_id)

    async def ReportSession(self, _: object, context: Any) -> None:
        stream = Accepted[conductor_pb2.ReportSessionResponse, conductor_pb2.ReportSessionRequest](context, WRITE_S)
        reporter: Reporter | None = None

        def take(message: conductor_pb2.ReportSessionRequest) -> Awaitable[None] | None:
            nonlocal reporter
            if reporter is not None:
                return now_or_in_turns(self._intake.apply(reporter, message), answer)
            kind = KVSTORE if message.registration.role == common_pb2.ROLE_STORE else WORKER
            check_claim(context, kind, message.registration.instance_id)
            reporter = self._intake.register(message)
            return now_or_in_turns(self._intake.apply(reporter, message), partial(welcome, reporter))

        def welcome(
            registered: Reporter, response: conductor_pb2.ReportSessionResponse | None
        ) -> Awaitable[None] | None:
            response = response or conductor_pb2.ReportSessionResponse()
            response.lease_ms = round(self._membership.lease_s * 1e3)
            response.sample_every = registered.every
            return answer(response)

        def answer(response: conductor_pb2.ReportSessionResponse | None) -> Awaitable[None] | None:
            if reporter is not None and reporter.left:
                stream.end()
                return None
            return None if response is None else stream.say(response)

        silent = _end_if_silent(stream)
        try:
            await stream.run(take)
        finally:
            silent.cancel()
            if reporter is not None:
                self._membership.close(reporter)

    async def ScheduleSession(self, _: object, context: Any) -> None:
        """Answers each message with one message, and pushes the instance list.

        A placement outlives its session: its request may be running. It ends by the instances' reports, by a release on
        any session, or by age. Only answers that could not be sent are taken back.
        """
        if self._lb_sessions >= self._lb_sessions_max:
            raise ResourceExhausted(f"{self._lb_sessions_max} sessions are open", retry_after_s=1.0)
        stream: _LbStream = Accepted(context, WRITE_S)

        def take(message: conductor_pb2.ScheduleSessionRequest) -> Awaitable[None] | None:
            released, requests = message.released_request_ids, message.requests
            if not stream.has_room or len(requests) > REQUESTS_PER_TURN or len(released) > RELEASES_PER_TURN:
                return self._take_in_turns(message, stream)
            for request_id in released:
                self._placer.release(request_id)
            if requests:
                self._answer_now(requests, stream)
            return None

        self._lb_sessions += 1
        self._metrics.lb_sessions.inc()
        silent = _end_if_silent(stream)
        try:
            await stream.run(take, self._listing.lists())
        finally:
            silent.cancel()
            self._lb_sessions -= 1
            self._metrics.lb_sessions.dec()

    async def _take_in_turns(self, message: conductor_pb2.ScheduleSessionRequest, stream: _LbStream) -> None:
        released = message.released_request_ids
        for at in range(0, len(released), RELEASES_PER_TURN):
            if at:
                await asyncio.sleep(0)
            for request_id in released[at : at + RELEASES_PER_TURN]:
                self._placer.release(request_id)
        for at in range(0, len(message.requests), REQUESTS_PER_TURN):
            if at:
                await asyncio.sleep(0)
            await self._answer(message.requests[at : at + REQUESTS_PER_TURN], stream)

    def _answer_now(self, requests: Sequence[conductor_pb2.ScheduleRequest], stream: _LbStream) -> None:
        answers, sent = self._answers(requests), False
        try:
            sent = stream.push(answers)
        finally:
            if not sent:
                self._take_back(answers)

    async def _answer(self, requests: Sequence[conductor_pb2.ScheduleRequest], stream: _LbStream) -> None:
        answers, sent = self._answers(requests), False
        try:
            await stream.write(answers)
            sent = True
        finally:
            if not sent:
                self._take_back(answers)

    def _answers(self, requests: Sequence[conductor_pb2.ScheduleRequest]) -> conductor_pb2.ScheduleSessionResponse:
        message = conductor_pb2.ScheduleSessionResponse()
        add, answer = message.responses.add, self._placer.answer
        for request in requests:
            answer(request, add())
        return message

    def _take_back(self, answers: conductor_pb2.ScheduleSessionResponse) -> None:
        """Nobody will hear of these placements."""
        for response in answers.responses:
            if response.HasField("placement"):
                self._placer.release(response.request_id)


def _end_if_silent(stream: Accepted[Any, Any]) -> asyncio.TimerHandle:
    def look() -> None:
        if not stream.spoke:
            stream.end(DeadlineExceeded(f"no message came within {FIRST_S:g} s"))

    return asyncio.get_running_loop().call_later(FIRST_S, look)
