"""The placing of requests, for both the unary method and the sessions of load balancers."""

from __future__ import annotations

import math
import secrets
import time
from logging import DEBUG

from pinyon.api.conductor.v1 import conductor_pb2
from pinyon.core.clock import Clock
from pinyon.core.errors import Internal, PinyonError
from pinyon.messages.checks import ID_CHARS_MAX
from pinyon.messages.error import error_to_proto
from pinyon.messages.placement import fill_placement, request_from_proto
from pinyon.placement.decision_log import DecisionLog
from pinyon.placement.inflight import InFlightTable
from pinyon.placement.planned_fetches import PlannedFetches
from pinyon.placement.policy import PlacementDecision, PlacementRequest
from pinyon.placement.scheduler import Scheduler
from pinyon.runtime.logging import get_logger
from pinyon.runtime.telemetry import Telemetry
from services.conductor.metrics import ConductorMetrics
from services.conductor.sizing import Sizing

_log = get_logger("conductor")

MOVES_EVERY_S, MOVES_NONE_S = 1.0, 0.01
"""Seconds until moves are looked for again, after a search that found some and after one that found none."""


class Placer:
    """A placer of requests, one after another on the event loop: each placement sees the effects of those before it."""

    def __init__(
        self,
        scheduler: Scheduler,
        inflight: InFlightTable,
        metrics: ConductorMetrics,
        telemetry: Telemetry,
        clock: Clock,
        *,
        ttft_slo_s: float = 0.0,
        tbt_slo_s: float = 0.0,
        sizing: Sizing | None = None,
        log: DecisionLog | None = None,
        planned: PlannedFetches | None = None,
    ) -> None:
        """Takes the seconds to the first token and between tokens for requests that name no SLO; 0 is no limit.

        ``sizing`` counts the instances that placements need, ``log`` keeps placements and refusals, and ``planned``
        keeps the fetches that placements planned."""
        self._scheduler = scheduler
        self._inflight = inflight
        self._metrics = metrics
        self._telemetry = telemetry
        self._clock = clock
        self._ttft_slo_s, self._tbt_slo_s = ttft_slo_s, tbt_slo_s
        self._sizing, self._log, self._planned = sizing, log, planned
        scheduler.consider = None if log is None else log.consider
        self._moves_at_s = -math.inf

    def place(self, message: conductor_pb2.ScheduleRequest, response: conductor_pb2.ScheduleResponse) -> None:
        """Places a request and fills ``response``. Raises a :class:`PinyonError` that says why none is possible."""
        started = time.perf_counter()
        request_id = message.request_id or f"conductor-{secrets.token_hex(8)}"
        with self._telemetry.span("conductor.schedule", message.traceparent, request_id=request_id) as span:
            request, now_s = None, self._clock()
            try:
                request = request_from_proto(message, request_id, self._ttft_slo_s, self._tbt_slo_s)
                span.classify(request.request_class)
                decision = self._scheduler.schedule(request, now_s)
            except PinyonError as error:
                if self._log is not None:
                    self._log.refused(request or _unread(request_id, message), error, now_s)
                self._metrics.placements.add((error.grpc_code.lower(),))
                # a request's own time between tokens may be shorter than any number of instances gives
                if self._sizing is not None and error.retry_after_s and not message.tbt_slo_ms:
                    self._sizing.refused(message.model)
                _log.debug("not placed: %s", error.message, extra={"request_id": request_id})
                raise
            if _log.isEnabledFor(DEBUG):
                where = decision.prefill.info.instance_id, decision.decode.info.instance_id, decision.ttft_s
                _log.debug("placed on %s and %s, first token in %.3f s", *where, extra={"request_id": request_id})
            span.set("prefill", decision.prefill.info.instance_id)
            span.set("decode", decision.decode.info.instance_id)
            span.set("reused_blocks", decision.reused_blocks)
            number = 0 if self._log is None else self._log.placed(request, now_s)
            response.request_id = request_id
            fill_placement(response.placement, decision, request.ttft_slo_s, number)
        if self._planned is not None and decision.fetches:
            self._planned.plan(decision, now_s)
        if now_s >= self._moves_at_s:
            self._look_at_moves(request, decision, now_s)
        if self._sizing is not None:
            self._sizing.placed(request, decision)
        if decision.shared_blocks and (layout := decision.decode.info.layout) is not None:
            self._metrics.shared_placements.add()
            self._metrics.shared_tokens.add((), decision.shared_blocks * layout.block_tokens)
        self._metrics.placements.add(("placed",))
        self._metrics.predicted_ttft.observe(decision.ttft_s)
        self._metrics.schedule_latency.observe(time.perf_counter() - started)

    def _look_at_moves(self, request: PlacementRequest, decision: PlacementDecision, now_s: float) -> None:
        """Counts and logs the waiting requests that the policy would move; a running conductor moves none.

        This runs only now and then: unmoved requests are found again each time, and a vain search reads two queues."""
        try:
            moves = self._scheduler.moves(request, decision, self._inflight.waiting, now_s)
        except Exception:
            _log.exception("what should wait elsewhere is not known", extra={"request_id": request.request_id})
            moves = []
        self._moves_at_s = now_s + (MOVES_EVERY_S if moves else MOVES_NONE_S)
        for move in moves:
            self._metrics.moves_wanted.add()
            if _log.isEnabledFor(DEBUG):
                where = move.source.info.instance_id, move.target.info.instance_id
                _log.debug("should wait at %s no more but at %s", *where, extra={"request_id": move.request.request_id})

    def answer(self, message: conductor_pb2.ScheduleRequest, response: conductor_pb2.ScheduleResponse) -> None:
        """Places a request as :meth:`place`, but puts errors into ``response``: even a bug fails one request only."""
        try:
            self.place(message, response)
            return
        except PinyonError as error:
            failure = error
        except Exception:
            _log.exception("a request could not be placed", extra={"request_id": message.request_id})
            self._metrics.placements.add(("internal",))
            failure = Internal("internal error")
        response.Clear()
        response.request_id = message.request_id
        response.error.CopyFrom(error_to_proto(failure))

    def release(self, request_id: str) -> bool:
        return self._inflight.release(request_id)


def _unread(request_id: str, message: conductor_pb2.ScheduleRequest) -> PlacementRequest:
    """Returns the fields of a malformed request that the log keeps."""
    return PlacementRequest(request_id[:ID_CHARS_MAX], message.model[:ID_CHARS_MAX], message.prompt_tokens)
