"""The metrics that the controller shows to Prometheus."""

from __future__ import annotations

from collections.abc import Callable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge

from pinyon.core.clock import Clock
from pinyon.federation.registry import LbRegistry
from pinyon.federation.view import Federation, LbState
from pinyon.runtime.metrics import Figure, Figures


class ControllerMetrics:
    """Counters to increment; the gauges read the federation when they are scraped."""

    def __init__(self, registry: CollectorRegistry, known: LbRegistry, clock: Clock) -> None:
        self._registry = registry
        self.probed = self._outcomes("probes", "Probes of load balancers", "answered", "silent")
        self.restarted = self._outcomes("restarts", "Runs of the restart hook", "ok", "failed")
        self.wrote = self._outcomes("state_writes", "Writes of the state file", "ok", "failed")
        self.sessions = Gauge("pinyon_controller_sessions", "Load balancers with a session", registry=registry)
        states = Gauge("pinyon_controller_load_balancers", "Load balancers by state", ("state",), registry=registry)
        for state in LbState:
            states.labels(state.value).set_function(partial(_count_state, known, state))
        gauges: list[Figure] = [
            ("version", "Version of the federation", lambda: known.federation.version),
            ("clusters", "Clusters", lambda: len(known.federation.clusters)),
            (
                "adopted_clusters",
                "Clusters that a load balancer serves for their owners",
                lambda: sum(bool(each.adopter) for each in known.federation.clusters),
            ),
            ("unserved_clusters", "Clusters that nobody serves", lambda: _unserved(known.federation)),
            ("settling", "1: just started, so unheard load balancers may live", lambda: known.settling(clock())),
        ]
        counters: list[Figure] = [
            ("failures", "Load balancers that failed", lambda: known.failures),
            ("takeovers", "Clusters that a load balancer adopted", lambda: known.takeovers),
            ("handbacks", "Clusters that their owners got back", lambda: known.handbacks),
        ]
        registry.register(Figures("pinyon_controller", gauges, counters))

    def _outcomes(self, name: str, text: str, well: str, badly: str) -> Callable[[bool], None]:
        """Returns a function that counts outcomes; it is called with whether one went well."""
        counter = Counter(f"pinyon_controller_{name}_total", text, ("outcome",), registry=self._registry)
        return lambda good: counter.labels(well if good else badly).inc()


def _count_state(known: LbRegistry, state: LbState) -> float:
    return float(sum(member.state is state for member in known.federation.members))


def _unserved(now: Federation) -> float:
    live = {member.info.lb_id for member in now.members if member.state is LbState.LIVE}
    return float(sum(not each.adopter and live.isdisjoint(each.owners) for each in now.clusters))
