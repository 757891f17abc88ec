"""What the load balancer shows to Prometheus.

The gauges read the state when they are scraped, so they are exact.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Gauge

from pinyon.runtime.tally import Count, Tally
from services.lb.conductor_session import ConductorSession
from services.lb.instances import InstanceView
from services.lb.line import Line
from services.lb.request import Request
from services.lb.worker_sessions import WorkerSessions

__all__ = ["E2E_BUCKETS_S", "TTFT_BUCKETS_S", "DoorMetrics", "LbMetrics"]

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
TBT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)
E2E_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class DoorMetrics:
    """Of the door and the line behind it, wherever requests go then. ``answered`` counts HTTP answers."""

    def __init__(self, registry: CollectorRegistry, line: Line) -> None:
        self._http = Count("pinyon_lb_http_requests", "HTTP requests answered", ("route", "status"), registry=registry)
        self._refused = Count(
            "pinyon_lb_refused", "Requests refused with 429 by the load balancer itself", ("reason",), registry=registry
        )
        self._broken = Count(
            "pinyon_lb_http_broken_streams",
            "Streams that began with 200 and ended with an error",
            ("error",),
            registry=registry,
        )
        self.http_connections = Gauge("pinyon_lb_http_connections", "Open HTTP connections", registry=registry)
        for name, text, value in (
            ("queue", "Requests waiting for their turn", lambda: line.queued),
            ("in_flight", "Requests being placed or running", lambda: line.in_flight),
        ):
            Gauge(f"pinyon_lb_{name}_requests", text, registry=registry).set_function(value)
        self._forwarded = Count(
            "pinyon_lb_forwarded", "Attempts forwarded to other regions", ("region",), registry=registry
        )
        self._accepted = Count(
            "pinyon_lb_accepted", "Requests taken from other regions", ("region",), registry=registry
        )
        self.forwarded_by_region: dict[str, int] = {}
        self.accepted_by_region: dict[str, int] = {}

    def answered(self, route: str, status: int) -> None:
        """``route`` must be one of a few: it is a label."""
        self._http.add((route, status))

    def refused(self, reason: str) -> None:
        """``reason`` must be one of a few: it is a label."""
        self._refused.add((reason,))

    def broken(self, error: str) -> None:
        """A stream ended with this error's code."""
        self._broken.add((error,))

    def forwarded(self, region: str) -> None:
        """``region`` is a peer's: there are few."""
        self._forwarded.add((region,))
        self.forwarded_by_region[region] = self.forwarded_by_region.get(region, 0) + 1

    def accepted(self, region: str) -> None:
        """``region`` is a peer's: there are few."""
        self._accepted.add((region,))
        self.accepted_by_region[region] = self.accepted_by_region.get(region, 0) + 1


class LbMetrics(DoorMetrics):
    """And of whole requests of either front door, on our own instances. ``models``: those served."""

    def __init__(
        self,
        registry: CollectorRegistry,
        models: Sequence[str],
        line: Line,
        conductor: ConductorSession,
        workers: WorkerSessions,
        view: InstanceView,
    ) -> None:
        super().__init__(registry, line)
        self._finished = Count(
            "pinyon_lb_requests", "Generations by how they ended", ("finish", "model"), registry=registry
        )
        self._no_token = Count(
            "pinyon_lb_no_token",
            "Generations that ended without a token, by how; pinyon_lb_ttft_seconds has the others",
            ("finish", "model"),
            registry=registry,
        )
        self._first = Tally(
            "pinyon_lb_ttft_seconds",
            "Arrival to first token, of requests that got one",
            "model",
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        self._whole = Tally(
            "pinyon_lb_e2e_seconds",
            "Arrival to last token, of finished requests",
            "model",
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )
        self._between = Tally(
            "pinyon_lb_tbt_seconds",
            "Mean time between the tokens of a request, of finished requests that have several",
            "model",
            buckets=TBT_BUCKETS_S,
            registry=registry,
        )
        self._open: set[Request] = set()
        of_model = ("model",)
        self._prompt = Count(
            "pinyon_lb_prompt_tokens", "Prompt tokens of finished requests", of_model, registry=registry
        )
        self._generated = Count("pinyon_lb_generated_tokens", "Tokens generated", of_model, registry=registry)
        self._cached = Count("pinyon_lb_cached_tokens", "Prompt tokens reused", of_model, registry=registry)
        for model in models:
            self._first.show(model)
            self._whole.show(model)
            self._between.show(model)
            for tokens in (self._prompt, self._generated, self._cached):
                tokens.add((model,), 0)
        self.retries = Count("pinyon_lb_retries", "Attempts after an instance failed", registry=registry)
        self.resumes = Count("pinyon_lb_resumes", "Retries of requests that had tokens", registry=registry)
        self.fallbacks = Count(
            "pinyon_lb_fallback_placements", "Placements made without the conductor", registry=registry
        )

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(name, text, registry=registry).set_function(value)

        gauge("pinyon_lb_unfinished_tokens", "Tokens generated for requests that have not ended", self._unfinished)
        gauge("pinyon_lb_placing_requests", "Requests waiting for the conductor", lambda: conductor.pending)
        gauge("pinyon_lb_instances", "Instances that requests can be sent to", lambda: len(view.addresses))
        gauge("pinyon_lb_unconfirmed_instances", "Instances that the conductor has not listed yet since it started",
              lambda: view.unconfirmed)  # fmt: skip
        gauge("pinyon_lb_worker_streams", "Requests open on instances", lambda: workers.streams)
        gauge("pinyon_lb_worker_sessions", "Sessions to instances", lambda: len(workers))
        gauge("pinyon_lb_counted_placements", "Requests counted on instances, per role", lambda: view.in_flight)
        gauge("pinyon_lb_conductor_connected", "1 while the conductor answers", lambda: float(conductor.connected))

    def began(self, request: Request) -> None:
        """A generation; it will have :meth:`ended`."""
        self._open.add(request)

    def _unfinished(self) -> float:
        # A copy in one go: the metrics server reads in a thread of its own.
        return float(sum([len(request.tokens) for request in list(self._open)]))

    def ended(self, request: Request, outcome: str, now_s: float) -> None:
        """A generation ended; ``outcome`` is a finish reason or an error's code."""
        self._open.discard(request)
        model = request.ask.model
        self._finished.add((outcome, model))
        if request.first_token_s:
            self._first.observe(request.first_token_s - request.arrived_s, model)
        else:
            self._no_token.add((outcome, model))
        if request.tokens:
            self._generated.add((model,), len(request.tokens))
        if request.finish_reason is not None:
            self._whole.observe(now_s - request.arrived_s, model)
            if (gaps := len(request.tokens) - 1) > 0:
                self._between.observe((now_s - request.first_token_s) / gaps, model)
            usage = request.usage()
            self._prompt.add((model,), usage.prompt_tokens)
            self._cached.add((model,), usage.cached_tokens)
