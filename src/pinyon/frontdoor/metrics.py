"""The load balancer's Prometheus metrics.

The gauges read the state when they are scraped, so they are exact."""

from __future__ import annotations

from collections.abc import Sequence
from functools import partial
from typing import Generic, TypeVar

from prometheus_client import CollectorRegistry, Gauge, generate_latest

from pinyon.core.clock import Clock
from pinyon.core.errors import NotFound
from pinyon.core.request import Usage
from pinyon.frontdoor.flight import Flight
from pinyon.frontdoor.line import Line
from pinyon.runtime.metrics import Figures
from pinyon.runtime.tally import Count, Tally

TTFT_BUCKETS_S = (0.005, 0.01, 0.025, 0.05, 0.1, 0.25, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0)
E2E_BUCKETS_S = (0.01, 0.05, 0.1, 0.5, 1.0, 2.5, 5.0, 10.0, 30.0, 60.0, 120.0, 300.0, 600.0)

PAGE_REST = 20
"""A page of metrics is reused for this many times the time it took to make, as anybody may ask for it at any rate."""

F = TypeVar("F", bound=Flight, contravariant=True)


class DoorMetrics(Generic[F]):
    """The metrics of the front door, its queue and whole requests. The loop reports when a request begins, is retried
    and ends. A kind of target reads from its own requests how they went, and adds the metrics that only it has.

    Labels are values of which there are few."""

    def __init__(self, registry: CollectorRegistry, line: Line, models: Sequence[str] = ()) -> None:
        """Creates the metrics; those of ``models`` are shown from the beginning."""
        count = partial(Count, registry=registry)
        tally = partial(Tally, label="model", registry=registry)
        self.page_registry: CollectorRegistry | None = registry
        """The registry of the page; None in one process of several, whose figures are not those of all."""
        self._page = b""
        self._page_until_s = 0.0
        self.answered = count("pinyon_lb_http_requests", "HTTP requests answered", ("route", "status"))
        self.refused = count("pinyon_lb_refused", "Requests refused with 429 by the load balancer itself", ("reason",))
        self.broken = count("pinyon_lb_http_broken_streams", "Streams that began with 200 and ended with an error",
                            ("error",))  # fmt: skip
        self.http_connections = Gauge("pinyon_lb_http_connections", "Open HTTP connections", registry=registry)
        queue = (
            ("queue_requests", "Requests waiting for their turn", lambda: line.queued),
            ("in_flight_requests", "Requests being placed or running", lambda: line.in_flight),
        )
        registry.register(Figures("pinyon_lb", queue))
        self.forwarded = count("pinyon_lb_forwarded", "Attempts forwarded to other regions", ("region",))
        self.accepted = count("pinyon_lb_accepted", "Requests taken from other regions", ("region",))
        self._finished = count("pinyon_lb_requests", "Requests by how they ended", ("finish", "model"))
        self._first = tally(
            "pinyon_lb_ttft_seconds",
            "Arrival to the first token, or an answer's first bytes, of requests that got one",
            buckets=TTFT_BUCKETS_S,
        )
        self._whole = tally(
            "pinyon_lb_e2e_seconds",
            "Arrival to the last token, or an answer's last bytes, of answered requests",
            buckets=E2E_BUCKETS_S,
        )
        self._prompt = count("pinyon_lb_prompt_tokens", "Prompt tokens of answered requests", ("model",))
        self._generated = count("pinyon_lb_generated_tokens", "Tokens generated", ("model",))
        self._cached = count("pinyon_lb_cached_tokens", "Prompt tokens reused", ("model",))
        for model in models:
            self._first.show(model)
            self._whole.show(model)
            self._took(model, Usage(0, 0, 0))
        self._retries = count("pinyon_lb_retries", "Attempts after one that failed")

    def page(self, clock: Clock) -> bytes:
        """Returns the whole page for Prometheus. Raises :class:`NotFound` in one process of several."""
        if self.page_registry is None:
            raise NotFound("One of several processes answers here. The metrics of all are at --metrics-listen.")
        started_s = clock()
        if started_s >= self._page_until_s:
            self._page = generate_latest(self.page_registry)
            self._page_until_s = started_s + PAGE_REST * (clock() - started_s)
        return self._page

    def began(self, flight: F) -> None:
        """Notes the beginning of a request, which will have :meth:`ended`."""

    def retried(self, flight: F) -> None:
        """Counts an attempt that follows a failed one."""
        self._retries.add()

    def ended(self, flight: F, outcome: str, now_s: float) -> None:
        """Counts an ended request by :meth:`count`; ``outcome`` is a label, so it must be one of a few words."""
        raise NotImplementedError

    def count(
        self, flight: F, outcome: str, now_s: float, first_s: float, used: Usage | None, *, answered: bool
    ) -> None:
        """Counts a request whose answer began at ``first_s`` (0: never); ``answered`` if the answer is complete."""
        model = flight.served.name
        self._finished.add((outcome, model))
        if first_s:
            self._first.observe(first_s - flight.arrived_s, model)
        if answered:
            self._whole.observe(now_s - flight.arrived_s, model)
        if used is not None:
            self._took(model, used)

    def _took(self, model: str, used: Usage) -> None:
        labels = (model,)
        self._prompt.add(labels, used.prompt_tokens)
        self._generated.add(labels, used.completion_tokens)
        self._cached.add(labels, used.cached_tokens)
