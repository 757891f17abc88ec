"""Takes requests through their life: queue, placement, submission, updates; again elsewhere when an instance fails."""

from __future__ import annotations

from collections.abc import AsyncGenerator
from contextlib import aclosing

from pinyon.api.common.v1 import common_pb2
from pinyon.api.worker.v1 import worker_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import NotFound, PinyonError, Unavailable
from pinyon.runtime.logging import get_logger
from pinyon.runtime.telemetry import Telemetry
from services.lb.conductor_session import ConductorAway, ConductorSession
from services.lb.instances import InstanceView
from services.lb.line import Line
from services.lb.metrics import LbMetrics
from services.lb.request import RETRY_CODES, Delta, Request
from services.lb.worker_sessions import WorkerSessions

__all__ = ["Dispatcher"]

POLL_S = 0.5
"""An instance may become placeable without a change of the list (its load fell)."""

_log = get_logger("lb")


class Dispatcher:
    """One per load balancer. Every request runs in the task that iterates over :meth:`run`."""

    def __init__(
        self,
        line: Line,
        conductor: ConductorSession,
        workers: WorkerSessions,
        view: InstanceView,
        metrics: LbMetrics,
        telemetry: Telemetry,
        clock: Clock,
        attempts: int,
        placement_wait_s: float,
    ) -> None:
        self._line = line
        self._conductor = conductor
        self._workers = workers
        self._view = view
        self._metrics = metrics
        self._telemetry = telemetry
        self._clock = clock
        self._attempts = attempts
        self._placement_wait_s = placement_wait_s

    async def run(self, request: Request) -> AsyncGenerator[Delta, None]:
        """What is new for the client, until the request has its ``finish_reason``.

        Raises the :class:`PinyonError` it failed with. The caller closes the generator (``aclosing``); wherever that
        happens, also by cancelling, nothing of the request is left on any hop.
        """
        ask = request.ask
        outcome = "cancelled"
        with self._telemetry.span("lb.request", ask.traceparent, request_id=ask.request_id) as span:
            span.classify(ask.request_class)
            request.traceparent = span.traceparent or ask.traceparent
            try:
                await self._line.enter()
                try:
                    while True:
                        placement = await self._place(request)
                        async with aclosing(self._attempt(request, placement)) as deltas:
                            async for delta in deltas:
                                yield delta
                        if request.finish_reason is not None:
                            outcome = request.finish_reason.value
                            return
                        self._retry_or_raise(request)
                finally:
                    self._line.leave()
            except PinyonError as error:
                outcome = error.grpc_code.lower()
                raise
            finally:
                now_s = self._clock()
                if outcome == "cancelled" and now_s >= request.deadline_s:
                    outcome = "deadline_exceeded"
                span.set("outcome", outcome)
                self._metrics.ended(request, outcome, now_s)

    async def _attempt(self, request: Request, placement: common_pb2.Placement) -> AsyncGenerator[Delta, None]:
        """One instance's part. Afterwards the request has a ``finish_reason`` or an ``error``."""
        clock = self._clock
        keys_fit = self._view.keys_fit(request.ask.model, placement.decode_instance_id)
        attempt_id = request.attempt_id
        placed_s = clock()
        request.begin_attempt(placement, placed_s)
        counted = self._view.begin(placement)
        stream, computed = None, False
        try:
            size_bytes = request.ask.size_bytes + placement.ByteSize()
            stream, submission = self._workers.open(placement.decode_address, size_bytes, request.gap_s)
            request.fill(submission, attempt_id, keys_fit, clock())
            del submission
            while request.finish_reason is None and request.error is None:
                delta = _fold(request, await stream.take(), clock())
                if not computed and (delta.tokens or request.finish_reason is not None):
                    computed = True
                    self._view.succeeded(placement.prefill_instance_id, placed_s)
                if delta.tokens or delta.text:
                    yield delta
        except Unavailable as error:
            request.error = error
        finally:
            self._view.end(counted)
            if stream is not None:
                stream.close()
            if request.finish_reason is not None:
                self._view.succeeded(placement.decode_instance_id, placed_s)
            else:
                # Whoever still lives reports the end itself; who does not cannot.
                self._conductor.release(attempt_id)

    def _retry_or_raise(self, request: Request) -> None:
        error = request.error
        assert error is not None
        if (failed := request.failed_instance) is not None:
            self._view.failed(failed, self._clock())
        if not request.retry(self._attempts):
            if error.grpc_code not in RETRY_CODES:
                raise error
            raise Unavailable(error.message)  # whatever the instance called it, the client may try again
        _log.warning(
            "attempt %d failed: %s", request.attempt, error.message,
            extra={"request_id": request.ask.request_id, "generated": len(request.tokens)},
        )  # fmt: skip
        self._metrics.retries.inc()
        if request.tokens:
            self._metrics.resumes.inc()

    async def _place(self, request: Request) -> common_pb2.Placement:
        """Where the next attempt runs; waits a while for an instance if there is none."""
        give_up_s = self._clock() + self._placement_wait_s
        while True:
            try:
                return await self._conductor.place(request.schedule_request())
            except ConductorAway:
                try:
                    placement = self._view.choose(
                        request.ask.model, request.total_tokens, request.exclude, self._clock()
                    )
                    self._metrics.fallbacks.inc()
                    return placement
                except Unavailable as unavailable:
                    error = unavailable
            except Unavailable as unavailable:
                error = unavailable
            except NotFound:
                # The model is ours, so what the conductor does not know is any instance of it.
                error = Unavailable("No instance is available for this model.", retry_after_s=1.0)
            left_s = give_up_s - self._clock()
            if left_s <= 0:
                raise error
            await self._view.wait_change(min(left_s, POLL_S))
            # One that failed us may have restarted under its old name; until something new is heard, its address may as
            # well still be dead, and the attempts are few.
            request.exclude = self._view.avoided(request.exclude, self._clock())


def _fold(request: Request, updates: list[worker_pb2.StreamUpdate], now_s: float) -> Delta:
    if len(updates) == 1:
        return request.fold(updates[0], now_s)
    texts: list[str] = []
    tokens: list[int] = []
    for update in updates:
        delta = request.fold(update, now_s)
        texts.append(delta.text)
        tokens += delta.tokens
    return Delta("".join(texts), tokens)
