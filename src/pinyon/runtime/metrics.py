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
"""A figure: its name after the service's, its text, and the function that reads it."""

LabelledFigure = tuple[str, str, str, Callable[[], Mapping[str, float]]]


def new_registry() -> CollectorRegistry:
    """Returns a registry with the process's own figures (CPU, memory, open files) and the version that runs."""
    registry = CollectorRegistry(auto_describe=True)
    build = Info("pinyon_build", "The version, and whether the pure rooms are compiled.", registry=registry)
    build.info({"version": __version__, "compiled": str(compiled()).lower()})
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


class Figures(Collector):
    """Figures that the parts of a process keep themselves, read when they are scraped, so that they cannot drift.

    The metrics server's thread reads them, so each has to be a number, or a copy that is made in one go."""

    def __init__(
        self,
        prefix: str,
        gauges: Iterable[Figure] = (),
        counters: Iterable[Figure] = (),
        labelled: Iterable[LabelledFigure] = (),
        labelled_gauges: Iterable[LabelledFigure] = (),
    ) -> None:
        """Takes the ``prefix`` of their names; the third item of a ``labelled`` figure is the label's name."""
        self._prefix = prefix
        self._plain = ((GaugeMetricFamily, list(gauges)), (CounterMetricFamily, list(counters)))
        self._labelled = ((CounterMetricFamily, list(labelled)), (GaugeMetricFamily, list(labelled_gauges)))

    def collect(self) -> Iterator[Metric]:
        for family, figures in self._plain:
            for name, text, read in figures:
                yield family(f"{self._prefix}_{name}", text, value=read())
        for labelled, many in self._labelled:
            for name, text, label, read_all in many:
                values = labelled(f"{self._prefix}_{name}", text, labels=(label,))
                for value, count in read_all().items():
                    values.add_metric((value,), count)
                yield values


def show_policies(registry: CollectorRegistry, service: str, **chosen: str) -> Callable[[str, str], None]:
    """Shows the policy of each kind that runs, as labels of ``pinyon_<service>_policies_info``.

    The returned function has to be called with ``(kind, choice)`` when another policy takes over."""
    shown = Info(f"pinyon_{service}_policies", "The policies that run, as they were chosen.", registry=registry)
    shown.info(chosen)

    def change(kind: str, choice: str) -> None:
        chosen[kind] = choice
        shown.info(chosen)

    return change


def show_certificate(registry: CollectorRegistry, not_after_s: Callable[[], float]) -> None:
    """Shows when this process's certificate ends, as ``pinyon_certificate_not_after_seconds``."""
    ends = Gauge(
        "pinyon_certificate_not_after_seconds", "Unix time at which the certificate in use ends.", registry=registry
    )
    ends.set_function(not_after_s)


class MetricsServer(PageServer):
    """A server of ``/metrics``; with TLS, beyond loopback, only for clients with a certificate of the cluster."""

    def __init__(self, listen: str, registry: CollectorRegistry, security: Security = NO_SECURITY) -> None:
        super().__init__("metrics", listen, make_wsgi_app(registry), security, ask_clients=True)
