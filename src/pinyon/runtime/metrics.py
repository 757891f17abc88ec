"""The Prometheus endpoint of one process."""

from __future__ import annotations

from collections.abc import Callable

from prometheus_client import (
    CollectorRegistry,
    Gauge,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    make_wsgi_app,
)

from pinyon import __version__
from pinyon.core.compiled import compiled
from pinyon.runtime.pages import PageServer
from pinyon.runtime.security import NO_SECURITY, Security


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures (CPU, memory, open files), and what runs."""
    registry = CollectorRegistry(auto_describe=True)
    build = Info("pinyon_build", "The version, and whether the pure rooms are compiled.", registry=registry)
    build.info({"version": __version__, "compiled": str(compiled()).lower()})
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


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
