"""The two kinds of sessions: a load balancer's requests are placed, an instance's reports are applied."""

from __future__ import annotations

import asyncio
from collections.abc import Awaitable, Sequence

from pinyon.api.common.v1 import common_pb2
from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.identity import KVSTORE, WORKER, check_claim
from services.conductor.intake import ReportIntake, now_or_in_turns
from services.conductor.membership import Membership, Reporter
from services.conductor.placing import Placer

LbStream = Accepted[conductor_pb2.ScheduleSessionResponse, conductor_pb2.ScheduleSessionRequest]
ReportStream = Accepted[conductor_pb2.ReportSessionResponse, conductor_pb2.ReportSessionRequest]

REQUESTS_PER_TURN = 64
RELEASES_PER_TURN = 4096
"""Limits of one turn; a message with more is processed in several turns, between which others get the event loop."""


class Placing:
    """A load balancer's session: each message with requests is answered by one message.

    Placements whose answer could not be sent are released."""

    def __init__(self, stream: LbStream, placer: Placer) -> None:
        self._stream = stream
        self._placer = placer

    def take(self, message: conductor_pb2.ScheduleSessionRequest) -> Awaitable[None] | None:
        """Takes one message, and returns what the caller has to await, if anything."""
        released, requests = message.released_request_ids, message.requests
        if not self._stream.has_room or len(requests) > REQUESTS_PER_TURN or len(released) > RELEASES_PER_TURN:
            return self._take_in_turns(message)
        for request_id in released[:]:
            self._placer.release(request_id)
        if requests:
            self._answer_now(requests[:])
        return None

    async def _take_in_turns(self, message: conductor_pb2.ScheduleSessionRequest) -> None:
        released = message.released_request_ids
        for at in range(0, len(released), RELEASES_PER_TURN):
            if at:
                await asyncio.sleep(0)
            for request_id in released[at : at + RELEASES_PER_TURN]:
                self._placer.release(request_id)
        for at in range(0, len(message.requests), REQUESTS_PER_TURN):
            if at:
                await asyncio.sleep(0)
            await self._answer(message.requests[at : at + REQUESTS_PER_TURN])

    def _answer_now(self, requests: Sequence[conductor_pb2.ScheduleRequest]) -> None:
        answers, sent = self._answers(requests), False
        try:
            sent = self._stream.push(answers)
        finally:
            if not sent:
                self._take_back(answers)

    async def _answer(self, requests: Sequence[conductor_pb2.ScheduleRequest]) -> None:
        answers, sent = self._answers(requests), False
        try:
            await self._stream.write(answers)
            sent = True
        finally:
            if not sent:
                self._take_back(answers)

    def _answers(self, requests: Sequence[conductor_pb2.ScheduleRequest]) -> conductor_pb2.ScheduleSessionResponse:
        message = conductor_pb2.ScheduleSessionResponse()
        add = message.responses.add
        for request in requests:
            self._placer.answer(request, add())
        return message

    def _take_back(self, answers: conductor_pb2.ScheduleSessionResponse) -> None:
        """Releases the placements in answers that could not be sent."""
        for response in answers.responses:
            if response.HasField("placement"):
                self._placer.release(response.request_id)


class Reporting:
    """An instance's session, which has to be closed at its end.

    The first message registers the instance, and must be from the instance that the caller's certificate names."""

    def __init__(self, stream: ReportStream, context: object, intake: ReportIntake, membership: Membership) -> None:
        self._stream = stream
        self._context = context
        self._intake = intake
        self._membership = membership
        self._reporter: Reporter | None = None

    def take(self, message: conductor_pb2.ReportSessionRequest) -> Awaitable[None] | None:
        """Takes one message, and returns what the caller has to await, if anything."""
        reporter = self._reporter
        if reporter is not None:
            return now_or_in_turns(self._intake.apply(reporter, message), self._answer)
        kind = KVSTORE if message.registration.role == common_pb2.ROLE_STORE else WORKER
        check_claim(self._context, kind, message.registration.instance_id)
        self._reporter = reporter = self._intake.register(message)
        return now_or_in_turns(self._intake.apply(reporter, message), self._welcome)

    def close(self) -> None:
        if self._reporter is not None:
            self._membership.close(self._reporter)

    def _welcome(self, response: conductor_pb2.ReportSessionResponse | None) -> Awaitable[None] | None:
        assert self._reporter is not None
        response = response or conductor_pb2.ReportSessionResponse()
        response.lease_ms = round(self._membership.lease_s * 1e3)
        response.sample_every = self._reporter.every
        return self._answer(response)

    def _answer(self, response: conductor_pb2.ReportSessionResponse | None) -> Awaitable[None] | None:
        if self._reporter is not None and self._reporter.left:
            self._stream.end()
            return None
        return None if response is None else self._stream.say(response)
