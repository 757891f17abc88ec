"""What the load balancer shows to Prometheus.

The gauges read the state when they are scraped, so they are exact; children of labels are looked up once.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

from prometheus_client import CollectorRegistry, Counter, Gauge, Histogram

from services.lb.conductor_session import ConductorSession
from services.lb.instances import InstanceView
from services.lb.line import Line
from services.lb.request import Request
from services.lb.worker_sessions import WorkerSessions

__all__ = ["E2E_BUCKETS_S", "TTFT_BUCKETS_S", "DoorMetrics", "LbMetrics"]

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
E2E_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)


class _OfModel:
    """One model's children."""

    def __init__(
        self, ttft: Histogram, e2e: Histogram, tokens_in: Counter, tokens_out: Counter, cached: Counter
    ) -> None:
        self.ttft, self.e2e = ttft, e2e
        self.tokens_in, self.tokens_out, self.tokens_cached = tokens_in, tokens_out, cached


class DoorMetrics:
    """Of the door and the line behind it, wherever requests go then. ``answered`` counts HTTP answers."""

    def __init__(self, registry: CollectorRegistry, line: Line) -> None:
        self._http = Counter(
            "pinyon_lb_http_requests_total", "HTTP requests answered", ("route", "status"), registry=registry
        )
        self._refused = Counter(
            "pinyon_lb_refused_total",
            "Requests refused with 429 by the load balancer itself",
            ("reason",),
            registry=registry,
        )
        self._broken = Counter(
            "pinyon_lb_http_broken_streams_total", "Streams that began with 200 and ended with an error", ("error",),
            registry=registry,
        )  # fmt: skip
        self._http_children: dict[tuple[str, int], Counter] = {}
        self.http_connections = Gauge("pinyon_lb_http_connections", "Open HTTP connections", registry=registry)
        for name, text, value in (
            ("queue", "Requests waiting for their turn", lambda: line.queued),
            ("in_flight", "Requests being placed or running", lambda: line.in_flight),
        ):
            Gauge(f"pinyon_lb_{name}_requests", text, registry=registry).set_function(value)
        self._forwarded = Counter(
            "pinyon_lb_forwarded_total", "Attempts forwarded to other regions", ("region",), registry=registry
        )
        self._accepted = Counter(
            "pinyon_lb_accepted_total", "Requests taken from other regions", ("region",), registry=registry
        )
        self.forwarded_by_region: dict[str, int] = {}
        self.accepted_by_region: dict[str, int] = {}

    def answered(self, route: str, status: int) -> None:
        """``route`` must be one of a few: it is a label."""
        child = self._http_children.get((route, status))
        if child is None:
            child = self._http_children[route, status] = self._http.labels(route, str(status))
        child.inc()

    def refused(self, reason: str) -> None:
        """``reason`` must be one of a few: it is a label."""
        self._refused.labels(reason).inc()

    def broken(self, error: str) -> None:
        """A stream ended with this error's code."""
        self._broken.labels(error).inc()

    def forwarded(self, region: str) -> None:
        """``region`` is a peer's: there are few."""
        self._forwarded.labels(region).inc()
        self.forwarded_by_region[region] = self.forwarded_by_region.get(region, 0) + 1

    def accepted(self, region: str) -> None:
        """``region`` is a peer's: there are few."""
        self._accepted.labels(region).inc()
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
        self._finished = Counter(
            "pinyon_lb_requests_total", "Generations by how they ended", ("finish", "model"), registry=registry
        )
        self._no_token = Counter(
            "pinyon_lb_no_token_total",
            "Generations that ended without a token, by how; pinyon_lb_ttft_seconds has the others",
            ("finish", "model"),
            registry=registry,
        )
        self._finish_children: dict[tuple[str, str], Counter] = {}
        ttft = Histogram(
            "pinyon_lb_ttft_seconds",
            "Arrival to first token, of requests that got one",
            ("model",),
            buckets=TTFT_BUCKETS_S,
            registry=registry,
        )
        e2e = Histogram(
            "pinyon_lb_e2e_seconds",
            "Arrival to last token, of finished requests",
            ("model",),
            buckets=E2E_BUCKETS_S,
            registry=registry,
        )

        def tokens(name: str, text: str) -> Counter:
            return Counter(f"pinyon_lb_{name}_tokens_total", text, ("model",), registry=registry)

        tokens_in = tokens("prompt", "Prompt tokens of finished requests")
        tokens_out = tokens("generated", "Tokens generated")
        cached = tokens("cached", "Prompt tokens reused")
        self._models = {
            model: _OfModel(
                ttft.labels(model),
                e2e.labels(model),
                tokens_in.labels(model),
                tokens_out.labels(model),
                cached.labels(model),
            )
            for model in models
        }
        self.retries = Counter("pinyon_lb_retries_total", "Attempts after an instance failed", registry=registry)
        self.resumes = Counter("pinyon_lb_resumes_total", "Retries of requests that had tokens", registry=registry)
        self.fallbacks = Counter(
            "pinyon_lb_fallback_placements_total", "Placements made without the conductor", registry=registry
        )

        def gauge(name: str, text: str, value: Callable[[], float]) -> None:
            Gauge(name, text, registry=registry).set_function(value)

        gauge("pinyon_lb_placing_requests", "Requests waiting for the conductor", lambda: conductor.pending)
        gauge("pinyon_lb_instances", "Instances that requests can be sent to", lambda: len(view.addresses))
        gauge("pinyon_lb_unconfirmed_instances", "Instances that the conductor has not listed yet since it started",
              lambda: view.unconfirmed)  # fmt: skip
        gauge("pinyon_lb_worker_streams", "Requests open on instances", lambda: workers.streams)
        gauge("pinyon_lb_worker_sessions", "Sessions to instances", lambda: len(workers))
        gauge("pinyon_lb_counted_placements", "Requests counted on instances, per role", lambda: view.in_flight)
        gauge("pinyon_lb_conductor_connected", "1 while the conductor answers", lambda: float(conductor.connected))

    def ended(self, request: Request, outcome: str, now_s: float) -> None:
        """A generation ended; ``outcome`` is a finish reason or an error's code."""
        model = request.ask.model
        child = self._finish_children.get((outcome, model))
        if child is None:
            child = self._finish_children[outcome, model] = self._finished.labels(outcome, model)
        child.inc()
        of_model = self._models[model]
        if request.first_token_s:
            of_model.ttft.observe(request.first_token_s - request.arrived_s)
        else:
            self._no_token.labels(outcome, model).inc()
        if request.tokens:
            of_model.tokens_out.inc(len(request.tokens))
        if request.finish_reason is not None:
            of_model.e2e.observe(now_s - request.arrived_s)
            usage = request.usage()
            of_model.tokens_in.inc(usage.prompt_tokens)
            if usage.cached_tokens:
                of_model.tokens_cached.inc(usage.cached_tokens)
