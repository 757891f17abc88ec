"""The Prometheus endpoint of one process."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Mapping

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    make_wsgi_app,
)
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from pinyon import __version__
from pinyon.core.compiled import compiled
from pinyon.runtime.pages import PageServer
from pinyon.runtime.security import NO_SECURITY, Security

Figure = tuple[str, str, Callable[[], float]]
"""Its name after the service's, its text, and what reads it."""


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures (CPU, memory, open files), and what runs."""
    registry = CollectorRegistry(auto_describe=True)
    build = Info("pinyon_build", "The version, and whether the pure rooms are compiled.", registry=registry)
    build.info({"version": __version__, "compiled": str(compiled()).lower()})
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class Figures(Collector):
    """Figures that the parts of a process keep themselves, read when they are scraped, so that they cannot drift.

    That is in the metrics server's thread: what each reads is a number, or a copy that is made in one go.
    """

    def __init__(
        self,
        prefix: str,
        gauges: Iterable[Figure] = (),
        counters: Iterable[Figure] = (),
        labelled: Iterable[tuple[str, str, str, Callable[[], Mapping[str, float]]]] = (),
    ) -> None:
        """``prefix`` of their names; of ``labelled`` counters the third is the label's name."""
        self._prefix = prefix
        self._plain = ((GaugeMetricFamily, list(gauges)), (CounterMetricFamily, list(counters)))
        self._labelled = list(labelled)

    def collect(self) -> Iterator[Metric]:
        for family, figures in self._plain:
            for name, text, read in figures:
                yield family(f"{self._prefix}_{name}", text, value=read())
        for name, text, label, read_all in self._labelled:
            counter = CounterMetricFamily(f"{self._prefix}_{name}", text, labels=(label,))
            for value, count in read_all().items():
                counter.add_metric((value,), count)
            yield counter


def show_policies(registry: CollectorRegistry, service: str, **chosen: str) -> Callable[[str, str], None]:
    """Which policy of each kind runs, as labels of ``pinyon_<service>_policies_info``.

    What is returned is told ``(kind, choice)`` when another one takes over.
    """
    shown = Info(f"pinyon_{service}_policies", "The policies that run, as they were chosen.", registry=registry)
    shown.info(chosen)

    def change(kind: str, choice: str) -> None:
        chosen[kind] = choice
        shown.info(chosen)

    return change


def show_certificate(registry: CollectorRegistry, not_after_s: Callable[[], float]) -> None:
    """When this process's certificate ends, as ``pinyon_certificate_not_after_seconds``."""
    ends = Gauge(
        "pinyon_certificate_not_after_seconds", "Unix time at which the certificate in use ends.", registry=registry
    )
    ends.set_function(not_after_s)


class MetricsServer(PageServer):
    """Serves ``/metrics``, beyond loopback with TLS to whoever has a certificate of the cluster."""

    def __init__(self, listen: str, registry: CollectorRegistry, security: Security = NO_SECURITY) -> None:
        super().__init__("metrics", listen, make_wsgi_app(registry), security, ask_clients=True)
