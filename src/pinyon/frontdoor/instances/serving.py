"""Requests that other regions send as tokens: served by this region's instances, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Sequence
from functools import partial
from typing import Any

from pinyon.api.lb.v1 import peer_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import (
    Cancelled,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PinyonError,
    ResourceExhausted,
    Unavailable,
)
from pinyon.core.request import FinishReason
from pinyon.frontdoor.access_log import AccessLog, Answered
from pinyon.frontdoor.failures import REGION_FIELD, REJECTED_FIELD, late
from pinyon.frontdoor.instances.ask import Ask, Wishes
from pinyon.frontdoor.instances.dispatcher import Dispatcher
from pinyon.frontdoor.instances.models import Models
from pinyon.frontdoor.instances.request import Delta, Request, facts_of
from pinyon.frontdoor.regions.arrival import Arrivals, ForwardedTurn
from pinyon.frontdoor.regions.inbound import REQUESTS_MAX, Inbound
from pinyon.frontdoor.served_models import ServedModels
from pinyon.http.budget import Budget
from pinyon.messages.checks import check_id
from pinyon.messages.error import error_to_proto
from pinyon.messages.finish_reason import finish_reason_to_proto
from pinyon.messages.request_class import class_from_proto
from pinyon.messages.sampling import sampling_from_proto
from pinyon.routing.geography import Geography
from pinyon.runtime.logging import get_logger

__all__ = ["TokenServing"]

_log = get_logger("lb.regions")

REQUEST_BYTES = 4096
"""What a request holds beside its prompt, about."""


class TokenServing:
    """The :class:`pinyon.frontdoor.regions.inbound.Serving` in front of our own instances."""

    def __init__(
        self,
        arrivals: Arrivals,
        ways: ServedModels,
        models: Models,
        dispatcher: Dispatcher,
        access: AccessLog,
        budget: Budget,
        timeout_s: float,
        clock: Clock,
    ) -> None:
        """``budget``: of bytes that requests of other regions hold here."""
        self.arrivals = arrivals
        self.ways = ways
        self.models = models
        self.dispatcher = dispatcher
        self.access = access
        self.budget = budget
        self.timeout_s = timeout_s
        self.clock = clock

    @property
    def geography(self) -> Geography:
        return self.arrivals.geography

    def requests(self, session: Inbound) -> _TokenRequests:
        return _TokenRequests(self, session)

    def states(self, sharing: int, region: str) -> list[peer_pb2.ModelState]:
        return [self.arrivals.state(model, room) for model, room in self.ways.rooms(sharing, region)]


def _give_back(budget: Budget, size: int, name: str) -> None:
    budget.take(-size, name)


class _TokenRequests:
    """Of one session."""

    def __init__(self, parts: TokenServing, session: Inbound) -> None:
        self._parts = parts
        self._session = session
        self._last_id = 0

    def take(self, message: peer_pb2.SessionRequest) -> None:
        if message.raw_requests:
            raise FailedPrecondition("requests are tokens here", field="raw_requests")
        for forwarded in message.requests:
            self._session.received += 1
            self._begin(forwarded)

    def response(self, parts: Sequence[Any]) -> peer_pb2.SessionResponse:
        return peer_pb2.SessionResponse(updates=parts)

    def _begin(self, forwarded: peer_pb2.ForwardedRequest) -> None:
        """Raises :class:`PinyonError`, which ends the session, for what no load balancer of ours sends."""
        submission = worker_pb2.Submission()
        try:
            submission.ParseFromString(forwarded.submission)
        except Exception:  # the library's own error is no public class
            raise InvalidArgument("a request that cannot be read", field="submission") from None
        stream_id = submission.stream_id
        if stream_id <= self._last_id:  # also of one that has ended
            raise InvalidArgument(f"stream {stream_id} is no new one", field="stream_id")
        self._last_id = stream_id
        if self._session.running >= REQUESTS_MAX:
            self._fail(stream_id, ResourceExhausted(f"{REQUESTS_MAX} requests are here", field=REGION_FIELD))
            return
        budget, name, size = self._parts.budget, self._session.peer.name, len(forwarded.submission) + REQUEST_BYTES
        if not budget.take(size, name):
            self._fail(stream_id, ResourceExhausted("requests of other regions hold too much", field=REGION_FIELD))
            return
        serving = self._serve(stream_id, submission, forwarded)
        self._session.begin(stream_id, serving, submission.request_id, lambda: _give_back(budget, size, name))

    async def _serve(
        self, stream_id: int, submission: worker_pb2.Submission, forwarded: peer_pb2.ForwardedRequest
    ) -> None:
        arrived_s, status = self._parts.clock(), 200
        requests: list[Request] = []
        try:
            await self._generate(stream_id, submission, forwarded, requests)
        except asyncio.CancelledError:
            status = Cancelled.http_status
            self._fail(stream_id, Unavailable("cancelled"))
            raise
        except PinyonError as error:
            status = error.http_status
            if isinstance(error, ResourceExhausted) and not error.field:  # no instance would be in time
                error = ResourceExhausted(error.message, field=REJECTED_FIELD, retry_after_s=error.retry_after_s)
            self._fail(stream_id, error)
        except Exception:
            status = Internal.http_status
            _log.exception("a forwarded request failed", extra={"request_id": submission.request_id})
            self._fail(stream_id, Internal("internal error"))
        finally:
            seen = Answered("FORWARDED", self._session.peer.region, status, arrived_s, "", "")
            if requests:
                ask = requests[0].ask
                seen = seen._replace(
                    request_id=ask.request_id, holder=ask.request_class.tenant, facts=partial(facts_of, requests)
                )
            self._parts.access.answered(seen)

    async def _generate(
        self,
        stream_id: int,
        submission: worker_pb2.Submission,
        forwarded: peer_pb2.ForwardedRequest,
        requests: list[Request],
    ) -> None:
        """What becomes one of the ``requests`` is put there."""
        parts, now_s = self._parts, self._parts.clock()
        timeout_s = min(submission.timeout_ms / 1e3 or parts.timeout_s, parts.timeout_s)
        request = await self._request(submission, now_s, timeout_s)
        requests.append(request)
        request.gap_s = min(forwarded.gap_ms, 1000) / 1e3
        whose = request.ask.request_class
        place = parts.arrivals.admit(self._session.peer, forwarded.hops, whose.geographies, whose.tenant)
        told = False

        def tell(delta: Delta) -> None:
            nonlocal told
            self._tell(stream_id, request, delta, first=not told)
            told = True

        try:
            async with asyncio.timeout(timeout_s):
                with place:
                    await parts.dispatcher.run(request, ForwardedTurn(place), tell)
        except TimeoutError:
            raise late(timeout_s, "") from None

    async def _request(self, submission: worker_pb2.Submission, now_s: float, timeout_s: float) -> Request:
        """Raises :class:`PinyonError`. A model that is not served here is no fault of the request."""
        tokens, generated = submission.prompt_tokens_le32, submission.generated_tokens
        if len(tokens) % 4 or len(tokens) < 4 * (generated + 1):
            raise InvalidArgument(f"{len(tokens)} bytes with {generated} tokens generated are no prompt")
        check_id(submission.request_id, "request_id")
        whose = class_from_proto(submission.request_class)
        try:
            prompts = self._parts.models.of(submission.model)
        except NotFound as error:
            raise ResourceExhausted(error.message, field=REJECTED_FIELD) from None
        prompt = tokens[: len(tokens) - 4 * generated]
        sampling = sampling_from_proto(submission.sampling)
        if generated > sampling.max_tokens:
            raise InvalidArgument(f"{generated} tokens are generated, of at most {sampling.max_tokens}")
        keys = await prompts.keys_of(whose, prompt)
        slo_ms = max(1, submission.ttft_left_ms) if submission.HasField("ttft_left_ms") else 0
        ask = Ask(
            submission.request_id,
            submission.model,
            whose,
            prompt,
            keys,
            sampling,
            Wishes(submission.no_reuse, slo_ms, submission.traceparent),
        )
        request = Request(ask, now_s, now_s + timeout_s)
        request.sender = self._session.peer.region
        request.fingerprint = submission.model_fingerprint
        if generated:
            request.go_on_after(tokens[len(prompt) :])
        return request

    # -- what goes

    def _tell(self, stream_id: int, request: Request, delta: Delta, *, first: bool) -> None:
        update = worker_pb2.StreamUpdate(stream_id=stream_id, tokens=delta.tokens, text=delta.text)
        if delta.logprobs.logprobs:
            update.logprobs.CopyFrom(delta.logprobs)
        if first:
            update.model_fingerprint = request.fingerprint
            if request.prefill is not None:
                update.prefill.CopyFrom(request.prefill)
            if request.prompt_logprobs.logprobs:
                update.prompt_logprobs.CopyFrom(request.prompt_logprobs)
        if request.finish_reason is not None:
            update.finish_reason = finish_reason_to_proto(request.finish_reason)
            update.usage.CopyFrom(request.usage_message())
        self._session.put(update)

    def _fail(self, stream_id: int, error: PinyonError) -> None:
        self._session.put(
            worker_pb2.StreamUpdate(
                stream_id=stream_id,
                finish_reason=finish_reason_to_proto(FinishReason.ERROR),
                error=error_to_proto(error),
            )
        )
