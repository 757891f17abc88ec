"""What the controller shows to Prometheus."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from functools import partial

from prometheus_client import CollectorRegistry, Counter, Gauge
from prometheus_client.metrics_core import CounterMetricFamily, Metric
from prometheus_client.registry import Collector

from pinyon.core.clock import Clock
from pinyon.federation.members import LbState
from pinyon.federation.registry import Registry
from pinyon.federation.view import Federation


class ControllerMetrics:
    """Counters to increment; the gauges read the federation when they are scraped."""

    def __init__(self, registry: CollectorRegistry) -> None:
        self._registry = registry
        self._probes = Counter(
            "pinyon_controller_probes_total", "Probes of load balancers", ("outcome",), registry=registry
        )
        self._restarts = Counter(
            "pinyon_controller_restarts_total", "Runs of the restart hook", ("outcome",), registry=registry
        )
        self._writes = Counter(
            "pinyon_controller_state_writes_total", "Writes of the state file", ("outcome",), registry=registry
        )
        self.sessions = Gauge("pinyon_controller_sessions", "Load balancers with a session", registry=registry)

    def probed(self, answered: bool) -> None:
        self._probes.labels("answered" if answered else "silent").inc()

    def restarted(self, well: bool) -> None:
        self._restarts.labels("ok" if well else "failed").inc()

    def wrote(self, well: bool) -> None:
        self._writes.labels("ok" if well else "failed").inc()

    def watch(self, known: Registry, clock: Clock) -> None:
        """Show what is in the registry."""
        registry = self._registry

        def gauge(name: str, text: str, value: Callable[[Federation], float]) -> None:
            Gauge(name, text, registry=registry).set_function(lambda: value(known.federation))

        states = Gauge("pinyon_controller_load_balancers", "Load balancers by state", ("state",), registry=registry)
        for state in LbState:
            states.labels(state.value).set_function(partial(_count_state, known, state))
        gauge("pinyon_controller_version", "Version of the federation", lambda now: float(now.version))
        gauge("pinyon_controller_clusters", "Clusters", lambda now: float(len(now.clusters)))
        gauge(
            "pinyon_controller_adopted_clusters",
            "Clusters that somebody serves who does not own them",
            lambda now: float(sum(bool(each.adopter) for each in now.clusters)),
        )
        gauge("pinyon_controller_unserved_clusters", "Clusters that nobody serves", _unserved)
        Gauge(
            "pinyon_controller_settling", "1: who is not heard may live, it has just started", registry=registry
        ).set_function(lambda: float(known.settling(clock())))
        registry.register(_Totals(known))


class _Totals(Collector):
    """Counts that the registry keeps."""

    def __init__(self, known: Registry) -> None:
        self._known = known

    def collect(self) -> Iterable[Metric]:
        for name, text, value in (
            ("failures", "Load balancers that failed", self._known.failures),
            ("takeovers", "Clusters that somebody adopted", self._known.takeovers),
            ("handbacks", "Clusters that their owners got back", self._known.handbacks),
        ):
            yield CounterMetricFamily(f"pinyon_controller_{name}", text, value=value)


def _count_state(known: Registry, state: LbState) -> float:
    return float(sum(member.state is state for member in known.federation.members))


def _unserved(now: Federation) -> float:
    live = {member.info.lb_id for member in now.members if member.state is LbState.LIVE}
    return float(sum(not each.adopter and live.isdisjoint(each.owners) for each in now.clusters))
