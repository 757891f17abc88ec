"""The load balancer's metrics of other people's servers, and of requests that went to them."""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator

from prometheus_client import CollectorRegistry
from prometheus_client.core import GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pinyon.frontdoor.line import Line
from pinyon.frontdoor.metrics import DoorMetrics
from pinyon.frontdoor.upstreams.fleet import ServerFleet
from pinyon.frontdoor.upstreams.forward import Forward
from pinyon.frontdoor.upstreams.server import Server
from pinyon.runtime.tally import Count

Servers = Callable[[], Collection[tuple[ServerFleet, Server]]]
"""A function that returns all present servers with their fleets, each name once."""


class UpstreamMetrics(DoorMetrics[Forward]):
    """The metrics of one load balancer. Labels are servers named in settings, and their models."""

    def __init__(self, registry: CollectorRegistry, line: Line, servers: Servers) -> None:
        super().__init__(registry, line)
        self._answers = Count(
            "pinyon_lb_upstream_answers",
            "Answers of servers by the first digit of their status; 0: none came",
            ("upstream", "status"),
            registry=registry,
        )
        registry.register(_Servers(servers))

    def got_answer(self, upstream: str, status: int) -> None:
        """Counts the answer of one attempt."""
        self._answers.add((upstream, status // 100))

    def ended(self, forward: Forward, outcome: str, now_s: float) -> None:
        self.count(forward, outcome, now_s, forward.first_s, forward.used, answered=outcome == "answered")


_GAUGES: tuple[tuple[str, str, Callable[[ServerFleet, Server], float]], ...] = (
    ("live", "1 for a server that gets requests",
     lambda fleet, server: float(server.healthy and not fleet.closed(server))),
    ("requests", "Requests of ours that a server has", lambda fleet, server: server.outstanding),
    ("connections", "Connections to a server, idle ones too", lambda fleet, server: server.pool.open),
    ("pending", "Requests that wait at a server, as it said last; -1: it does not say",
     lambda fleet, server: server.report.pending),
    ("running", "Requests that a server runs, as it said last; -1: it does not say",
     lambda fleet, server: server.report.running),
    ("capacity", "Requests in a server's batch, as set, said or learned; 0: unknown",
     lambda fleet, server: server.room_for),
    ("models", "Models that a server lists", lambda fleet, server: len(server.models)),
)  # fmt: skip


class _Servers(Collector):
    """The gauges of servers, which read the state when they are scraped, so they are exact."""

    def __init__(self, servers: Servers) -> None:
        self._servers = servers

    def collect(self) -> Iterator[Metric]:
        servers = self._servers()
        for name, text, value in _GAUGES:
            gauge = GaugeMetricFamily(f"pinyon_lb_upstream_{name}", text, labels=("upstream",))
            for fleet, server in servers:
                gauge.add_metric([server.name], value(fleet, server))
            yield gauge
