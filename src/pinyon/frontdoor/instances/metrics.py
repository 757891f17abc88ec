"""The load balancer's metrics of requests on instances of pinyon."""

from __future__ import annotations

from collections.abc import Sequence

from prometheus_client import CollectorRegistry

from pinyon.core.request import Usage
from pinyon.frontdoor.instances.clusters import Clusters
from pinyon.frontdoor.instances.request import Request
from pinyon.frontdoor.line import Line
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.upstreams.forward import Forward
from pinyon.runtime.metrics import Figure, Figures
from pinyon.runtime.tally import Count, Tally

TBT_BUCKETS_S = (0.001, 0.0025, 0.005, 0.0075, 0.01, 0.015, 0.02, 0.03, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.5, 1.0, 2.5)


class LbMetrics(DoorMetrics[Request | Forward]):
    """The metrics of requests from both front doors on our own instances, and of those that go on to servers of
    instances. ``models`` are those served."""

    def __init__(self, registry: CollectorRegistry, models: Sequence[str], line: Line, clusters: Clusters) -> None:
        super().__init__(registry, line, models)
        home, workers = clusters.home, clusters.workers
        self._no_token = Count(
            "pinyon_lb_no_token",
            "Requests that ended without a token, by how; pinyon_lb_ttft_seconds has the others",
            ("finish", "model"),
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
        for model in models:
            self._between.show(model)
        self._resumes = Count("pinyon_lb_resumes", "Retries of requests that had tokens", registry=registry)
        self.fallbacks = Count(
            "pinyon_lb_fallback_placements", "Placements made without the conductor", registry=registry
        )
        gauges: tuple[Figure, ...] = (
            ("unfinished_tokens", "Tokens generated for requests that have not ended", self._unfinished),
            ("placing_requests", "Requests waiting for the conductor", lambda: home.conductor.pending),
            ("instances", "Instances that requests can be sent to", lambda: len(home.addresses)),
            ("unconfirmed_instances", "Instances that the conductor has not listed yet since it started",
             lambda: home.unconfirmed),
            ("worker_streams", "Requests open on instances", lambda: workers.streams),
            ("worker_sessions", "Sessions to instances", lambda: len(workers)),
            ("counted_placements", "Requests counted on instances, per role", lambda: home.in_flight),
            ("conductor_connected", "1 while the conductor answers", lambda: float(home.conductor.connected)),
        )  # fmt: skip
        registry.register(Figures("pinyon_lb", gauges))

    def began(self, request: Request | Forward) -> None:
        if isinstance(request, Request):
            self._open.add(request)

    def retried(self, request: Request | Forward) -> None:
        super().retried(request)
        if request.reply.begun if isinstance(request, Forward) else request.tokens:
            self._resumes.add()

    def _unfinished(self) -> float:
        # list() copies the set at once, as the metrics server reads in a thread of its own
        return float(sum([len(request.tokens) for request in list(self._open)]))

    def ended(self, request: Request | Forward, outcome: str, now_s: float) -> None:
        """Counts an ended request; ``outcome`` is a finish reason or an error's code."""
        if isinstance(request, Forward):
            self.count(request, outcome, now_s, request.first_s, request.used, answered=outcome == "answered")
            return
        self._open.discard(request)
        done, tokens, usage = request.finish_reason is not None, len(request.tokens), request.usage()
        used = Usage(usage.prompt_tokens, tokens, usage.cached_tokens) if done else Usage(0, tokens, 0)
        self.count(request, outcome, now_s, request.first_token_s, used, answered=done)
        model = request.model
        if not request.first_token_s:
            self._no_token.add((outcome, model))
        if done and tokens > 1:
            self._between.observe((now_s - request.first_token_s) / (tokens - 1), model)
