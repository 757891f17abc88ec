"""What another region's load balancer sends here: its requests are served by this region's instances, or refused."""

from __future__ import annotations

import asyncio
import math
from collections.abc import AsyncGenerator, Callable
from contextlib import aclosing

from pinyon.api.lb.v1 import peer_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import (
    Cancelled,
    DeadlineExceeded,
    FailedPrecondition,
    Internal,
    InvalidArgument,
    NotFound,
    PermissionDenied,
    PinyonError,
    ResourceExhausted,
    Unavailable,
)
from pinyon.core.request import FinishReason
from pinyon.messages.checks import check_id
from pinyon.messages.error import error_to_proto
from pinyon.messages.finish_reason import finish_reason_to_proto
from pinyon.messages.request_class import class_from_proto
from pinyon.messages.sampling import sampling_from_proto
from pinyon.runtime.duplex import Accepted
from pinyon.runtime.logging import get_logger
from pinyon.runtime.outbox import Outbox, OutboxClosed, in_messages
from services.lb.access_log import AccessLog
from services.lb.ask import Ask
from services.lb.budget import Budget
from services.lb.dispatcher import Dispatcher
from services.lb.line import Line, Place
from services.lb.metrics import LbMetrics
from services.lb.models import Models
from services.lb.regions.peer import Peer
from services.lb.regions.proof import caller_proof, request_proof, same
from services.lb.request import REGION_FIELD, REJECTED_FIELD, Delta, Request
from services.lb.ways import Ways

__all__ = ["Inbound", "InboundParts"]

STATE_S = 0.1
"""Between two states, if something has changed (SkyWalker §4.1)."""
STATE_TICKS_MAX = 5
"""A state is a sign of life, too: one comes at least every so many times."""
REQUESTS_MAX = 4096
"""Of one session at once."""
REQUEST_BYTES = 4096
"""What a request holds beside its prompt, about."""
OUTBOX_LIMIT = 65_536
FAREWELL_S = 0.2
PROOF_S = 5.0
"""From its first message until it has proved what it is."""

_log = get_logger("lb.regions")


class InboundParts:
    """What sessions from other regions need of this load balancer."""

    def __init__(
        self,
        own: Peer,
        secret: bytes,
        ways: Ways,
        line: Line,
        models: Models,
        dispatcher: Dispatcher,
        metrics: LbMetrics,
        access: AccessLog,
        draining: Callable[[], bool],
        timeout_s: float,
        clock: Clock,
        budget: Budget,
    ) -> None:
        """``budget``: of bytes that requests of other regions hold here."""
        self.own = own
        self.secret = secret
        self.ways = ways
        self.line = line
        self.models = models
        self.dispatcher = dispatcher
        self.metrics = metrics
        self.access = access
        self.draining = draining
        self.timeout_s = timeout_s
        self.clock = clock
        self.budget = budget
        self.sessions: set[Inbound] = set()
        self.ending = False
        """Sessions end as soon as they have no requests."""

    def end(self) -> None:
        """The load balancer takes nothing new: what is here may finish, and nobody keeps a session for more."""
        self.ending = True
        for session in list(self.sessions):
            session.end_if_idle()

    @property
    def requests(self) -> int:
        """Of other regions, being served."""
        return sum(session.requests for session in self.sessions)


class Inbound:
    """One session, after its welcome. ``run`` ends with it; then nothing of it is left."""

    def __init__(self, parts: InboundParts, peer: Peer, nonce: bytes, on_known: Callable[[], None]) -> None:
        """``on_known`` is called when it has proved what it is."""
        self.peer = peer
        self._parts = parts
        self._nonce = nonce
        self._outbox: Outbox[worker_pb2.StreamUpdate] = Outbox(OUTBOX_LIMIT)
        self._news = asyncio.Event()
        self._known = asyncio.Event()
        """It has proved that it is of the federation."""
        self._on_known = on_known
        if not parts.secret:
            self._prove()
        self._probe = 0
        self._state: peer_pb2.RegionState | None = None
        self._version = 0
        self._received = 0
        self._tasks: dict[int, asyncio.Task[None]] = {}
        self._stream: Accepted[peer_pb2.SessionResponse, peer_pb2.SessionRequest] | None = None

    @property
    def requests(self) -> int:
        return len(self._tasks)

    @property
    def known(self) -> bool:
        return self._known.is_set()

    async def run(
        self, stream: Accepted[peer_pb2.SessionResponse, peer_pb2.SessionRequest], welcome: peer_pb2.PeerWelcome
    ) -> None:
        self._stream = stream
        self._parts.sessions.add(self)
        self.end_if_idle()
        states = asyncio.create_task(self._states(stream), name=f"states for {self.peer.name}")
        try:
            await stream.run(self._take, self._messages(welcome))
        finally:
            states.cancel()
            self._parts.sessions.discard(self)
            self._outbox.close()
            tasks = list(self._tasks.values())
            for task in tasks:
                task.cancel()
            await asyncio.gather(*tasks, states, return_exceptions=True)

    # -- what comes

    def _prove(self) -> None:
        self._known.set()
        self._on_known()

    def _take(self, message: peer_pb2.SessionRequest) -> None:
        if not self._known.is_set():
            parts = self._parts
            expected = caller_proof(parts.secret, self._nonce, self.peer.region, self.peer.name)
            if not same(message.proof, expected):
                raise PermissionDenied("the federation's secret is another one here", field="proof")
            self._prove()
        if message.probe:
            self._probe = message.probe
            self._news.set()
        for forwarded in message.requests:
            self._received += 1
            self._begin(forwarded)
        for stream_id in message.cancel_stream_ids:
            task = self._tasks.get(stream_id)
            if task is not None:
                task.cancel()

    def _begin(self, forwarded: peer_pb2.ForwardedRequest) -> None:
        """Raises :class:`PinyonError`, which ends the session, for what no load balancer of ours sends."""
        expected = request_proof(self._parts.secret, self._nonce, forwarded.hops, forwarded.submission)
        if not same(forwarded.proof, expected):
            raise PermissionDenied("a request whose proof is wrong", field="proof")
        submission = worker_pb2.Submission()
        try:
            submission.ParseFromString(forwarded.submission)
        except Exception:  # the library's own error is no public class
            raise InvalidArgument("a request that cannot be read", field="submission") from None
        stream_id = submission.stream_id
        if stream_id in self._tasks:
            raise InvalidArgument(f"stream {stream_id} is in use", field="stream_id")
        if len(self._tasks) >= REQUESTS_MAX:
            self._fail(stream_id, ResourceExhausted(f"{REQUESTS_MAX} requests are here", field=REGION_FIELD))
            return
        size = len(forwarded.submission) + REQUEST_BYTES
        if not self._parts.budget.take(size, self.peer.name):
            self._fail(stream_id, ResourceExhausted("requests of other regions hold too much", field=REGION_FIELD))
            return
        task = asyncio.create_task(self._serve(stream_id, submission, forwarded), name=submission.request_id)
        self._tasks[stream_id] = task
        task.add_done_callback(lambda _: self._ended(stream_id, size))

    def _ended(self, stream_id: int, size: int) -> None:
        self._tasks.pop(stream_id, None)
        self._parts.budget.take(-size, self.peer.name)
        if self._parts.ending and not self._tasks:
            # Not before what it said last has gone: its caller would take that for lost.
            asyncio.get_running_loop().call_later(FAREWELL_S, self.end_if_idle)

    def end_if_idle(self) -> None:
        if self._parts.ending and not self._tasks and self._stream is not None:
            self._stream.end()

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
            self._parts.access.answered(
                "FORWARDED", self.peer.region, status,
                arrived_s=arrived_s, request_id=requests[0].ask.request_id if requests else "",
                holder=requests[0].ask.request_class.tenant if requests else "", requests=requests,
            )  # fmt: skip

    async def _generate(
        self,
        stream_id: int,
        submission: worker_pb2.Submission,
        forwarded: peer_pb2.ForwardedRequest,
        requests: list[Request],
    ) -> None:
        """What becomes one of the ``requests`` is put there."""
        parts, now_s = self._parts, self._parts.clock()
        if forwarded.hops != 1:
            raise FailedPrecondition(f"it has come through {forwarded.hops} regions, only one is allowed")
        timeout_s = min(submission.timeout_ms / 1e3 or parts.timeout_s, parts.timeout_s)
        request = await self._request(submission, now_s, timeout_s)
        requests.append(request)
        request.gap_s = min(forwarded.gap_ms, 1000) / 1e3
        self._check_law(request)
        if parts.draining():
            raise ResourceExhausted("the region's load balancer is about to end", field=REGION_FIELD)
        try:
            place = parts.line.reserve(request.ask.request_class.tenant)
        except ResourceExhausted as full:
            raise ResourceExhausted(full.message, field=REGION_FIELD, retry_after_s=full.retry_after_s) from None
        parts.metrics.accepted(self.peer.region)
        told = False
        try:
            async with asyncio.timeout(timeout_s):
                with place:
                    async with aclosing(parts.dispatcher.run(request, _Turn(place))) as deltas:
                        async for delta in deltas:
                            self._tell(stream_id, request, delta, first=not told)
                            told = True
        except TimeoutError:
            raise DeadlineExceeded(f"The request took longer than {timeout_s:g} s.") from None

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
            submission.request_id, submission.model, whose, prompt, keys, sampling, submission.no_reuse, slo_ms,
            submission.traceparent,
        )  # fmt: skip
        request = Request(ask, now_s, now_s + timeout_s)
        request.sender = self.peer.region
        request.fingerprint = submission.model_fingerprint
        if generated:
            request.go_on_after(tokens[len(prompt) :])
        return request

    def _check_law(self, request: Request) -> None:
        """What the sender must not send, or this region must not serve, is refused here again."""
        whose, geography = request.ask.request_class, self._parts.ways.geography
        verdict = geography.may(self.peer.region, self._parts.own.region, whose.geographies, whose.tenant)
        if not verdict.allowed:
            raise ResourceExhausted(f"Not served in {self._parts.own.region}: {verdict.reason}.", field=REJECTED_FIELD)

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
        self._put(update)

    def _fail(self, stream_id: int, error: PinyonError) -> None:
        self._put(
            worker_pb2.StreamUpdate(
                stream_id=stream_id,
                finish_reason=finish_reason_to_proto(FinishReason.ERROR),
                error=error_to_proto(error),
            )
        )

    def _put(self, update: worker_pb2.StreamUpdate) -> None:
        try:
            self._outbox.put(update)
        except OutboxClosed:
            return
        except ResourceExhausted as full:  # who reads so slowly is not there
            if self._stream is not None:
                self._stream.end(full)
            return
        self._news.set()

    async def _states(self, stream: Accepted[peer_pb2.SessionResponse, peer_pb2.SessionRequest]) -> None:
        """Tell how the region is, whenever that has changed."""
        try:
            async with asyncio.timeout(PROOF_S):
                await self._known.wait()
        except TimeoutError:
            stream.end(DeadlineExceeded(f"no proof came within {PROOF_S:g} s"))
            return
        ticks = 0
        last: peer_pb2.RegionState | None = None
        while True:
            state = self._now()
            ticks += 1
            if last is None or ticks >= STATE_TICKS_MAX or state != last:
                last, ticks = state, 0
                self._version += 1
                self._state = peer_pb2.RegionState(version=self._version)
                self._state.MergeFrom(state)
                self._news.set()
            await asyncio.sleep(STATE_S)

    def _now(self) -> peer_pb2.RegionState:
        parts = self._parts
        state = peer_pb2.RegionState(draining=parts.draining(), received=self._received)
        sharing = sum(session.known for session in parts.sessions)
        for model in parts.ways.models:
            instances, available, running, share = parts.ways.states(model, sharing)
            # While there is room here, nobody waits for it: those who do must not be served here.
            queued = 0 if share or share is None else parts.line.queued
            told = state.models.add(
                model=model, instances=instances, available_instances=available, queued=queued, running=running
            )
            if share is not None:
                told.credits = share
        return state

    async def _messages(self, welcome: peer_pb2.PeerWelcome) -> AsyncGenerator[peer_pb2.SessionResponse, None]:
        yield peer_pb2.SessionResponse(welcome=welcome)
        while True:
            await self._news.wait()
            self._news.clear()
            updates = await self._outbox.take_all() if len(self._outbox) else []
            parts = list(in_messages(updates)) or [[]]
            probe, self._probe = self._probe, 0
            state, self._state = self._state, None
            for number, part in enumerate(parts):
                message = peer_pb2.SessionResponse(updates=part)
                if number == 0:
                    message.probe = probe
                    if state is not None:
                        message.state.CopyFrom(state)
                yield message


class _Turn:
    """Of a forwarded request: its tenant's rates were counted where it came from."""

    def __init__(self, place: Place) -> None:
        self._place = place

    async def turn(self, tokens: int, *, priority: int = 0, demand: int = 0, deadline_s: float = math.inf) -> None:
        try:
            await self._place.turn(tokens, priority=priority, demand=demand, deadline_s=deadline_s)
        except ResourceExhausted as displaced:
            raise ResourceExhausted(displaced.message, field=REGION_FIELD) from None

    def release(self) -> None:
        self._place.release()

    async def again(self, demand: int) -> bool:
        await self._place.again(demand)
        return True

    def leave(self, used_tokens: int = 0) -> None:
        self._place.leave()
