"""Requests that other regions send as tokens: served by this region's instances, or refused."""

from __future__ import annotations

import asyncio
from collections.abc import Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import numpy as np

from pinyon.api.lb.v1 import peer_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.errors import FailedPrecondition, InvalidArgument, NotFound, PinyonError, ResourceExhausted
from pinyon.core.request import RequestClass
from pinyon.frontdoor.auth import Client
from pinyon.frontdoor.failures import REJECTED_FIELD, late
from pinyon.frontdoor.head import Head
from pinyon.frontdoor.instances.kind import Dispatcher
from pinyon.frontdoor.instances.prompts import Prompts, prompts_of
from pinyon.frontdoor.instances.request import Delta, Request, Terms, facts_of
from pinyon.frontdoor.regions.inbound import InboundSession, Serving
from pinyon.frontdoor.regions.peer import PeerBalancer
from pinyon.frontdoor.update_stream import failed_update
from pinyon.http.budget import Share
from pinyon.messages.enums import finish_reason_to_proto
from pinyon.messages.request_class import class_from_proto
from pinyon.messages.sampling import sampling_from_proto

REQUEST_BYTES = 4096
"""The approximate bytes that a request holds beside its prompt."""


@dataclass(eq=False)
class TokenServing(Serving):
    """The serving of other regions' requests by our own instances."""

    prompts: Mapping[str, Prompts]
    dispatcher: Dispatcher

    def session(self, peer: PeerBalancer) -> InboundSession[TokenServing]:
        return _TokenInbound(self, peer)


class _TokenInbound(InboundSession[TokenServing]):
    def take(self, message: peer_pb2.SessionRequest) -> None:
        if message.raw_requests:
            raise FailedPrecondition("requests are tokens here", field="raw_requests")
        for forwarded in message.requests:
            submission = worker_pb2.Submission()
            try:
                submission.ParseFromString(forwarded.submission)
            except Exception:  # the library's own error is no public class
                raise InvalidArgument("a request that cannot be read", field="submission") from None
            self.begin(submission.stream_id, submission.request_id, partial(self._run, submission, forwarded))

    def add(self, message: peer_pb2.SessionResponse, part: Any) -> None:
        message.updates.append(part)

    def told(self, error: PinyonError) -> PinyonError:
        if isinstance(error, ResourceExhausted) and not error.field:  # no instance would be in time
            return ResourceExhausted(error.message, field=REJECTED_FIELD, retry_after_s=error.retry_after_s)
        return error

    async def _run(
        self, submission: worker_pb2.Submission, forwarded: peer_pb2.ForwardedRequest, head: Head, share: Share
    ) -> int:
        serving, peer = self.serving, self.peer
        whose = class_from_proto(submission.request_class)
        head.client, head.holder = Client(whose.tenant), whose.tenant
        self.hold(share, peer.name, len(forwarded.submission) + REQUEST_BYTES)
        timeout_s = min(submission.timeout_ms / 1e3 or serving.timeout_s, serving.timeout_s)
        request = await self._request(submission, whose, head.arrived_s, timeout_s)
        request.gap_s = min(forwarded.gap_ms, 1000) / 1e3
        head.facts = partial(facts_of, (request,))
        place = serving.admit(peer, forwarded.hops, whose.geographies, whose.tenant)
        told = False

        def tell(delta: Delta) -> None:
            nonlocal told
            self._tell(submission.stream_id, request, delta, first=not told)
            told = True

        try:
            async with asyncio.timeout(timeout_s):
                with place:
                    await serving.dispatcher.run(request, place, tell)
        except TimeoutError:
            raise late(timeout_s, "") from None
        return 200

    async def _request(
        self, submission: worker_pb2.Submission, whose: RequestClass, now_s: float, timeout_s: float
    ) -> Request:
        """Returns the request. Raises :class:`PinyonError`; an unknown model is no fault of the request."""
        tokens, generated = submission.prompt_tokens_le32, submission.generated_tokens
        if len(tokens) % 4 or len(tokens) < 4 * (generated + 1):
            raise InvalidArgument(f"{len(tokens)} bytes with {generated} tokens generated are no prompt")
        try:
            self.serving.models.check_own(submission.model)
            prompts = prompts_of(self.serving.prompts, submission.model)
        except (NotFound, FailedPrecondition) as error:
            raise ResourceExhausted(error.message, field=REJECTED_FIELD) from None
        prompt = tokens[: len(tokens) - 4 * generated]
        sampling = sampling_from_proto(submission.sampling)
        if generated > sampling.max_tokens:
            raise InvalidArgument(f"{generated} tokens are generated, of at most {sampling.max_tokens}")
        keys = await prompts.keys_of(whose, prompt)
        slo_ms = max(1, submission.ttft_left_ms) if submission.HasField("ttft_left_ms") else 0
        terms = Terms(now_s, now_s + timeout_s, False, submission.no_reuse, slo_ms, submission.traceparent)
        request = Request(submission.request_id, submission.model, whose, prompt, keys, sampling, terms)
        request.sender = self.peer.region
        request.fingerprint = submission.model_fingerprint
        if generated:
            # In the other region, the text of these tokens is known.
            request.tokens = np.frombuffer(tokens, "<u4", offset=len(prompt)).tolist()
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
        self.put(update)

    def fail(self, stream_id: int, error: PinyonError) -> None:
        self.put(failed_update(stream_id, error))
