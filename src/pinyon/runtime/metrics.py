"""The Prometheus endpoint of one process."""

from __future__ import annotations

from prometheus_client import (
    CollectorRegistry,
    GCCollector,
    Info,
    PlatformCollector,
    ProcessCollector,
    start_http_server,
)

from pinyon.core.address import parse_address

__all__ = ["MetricsServer", "new_registry", "show_policies"]


def new_registry() -> CollectorRegistry:
    """A registry with the process's own figures (CPU, memory, open files)."""
    registry = CollectorRegistry(auto_describe=True)
    ProcessCollector(registry=registry)
    PlatformCollector(registry=registry)
    GCCollector(registry=registry)
    return registry


def show_policies(registry: CollectorRegistry, service: str, **chosen: str) -> None:
    """Which policy of each kind runs, as labels of ``pinyon_<service>_policies_info``."""
    Info(f"pinyon_{service}_policies", "The policies that run, as they were chosen.", registry=registry).info(chosen)


class MetricsServer:
    """Serves ``/metrics`` from a thread of its own, so that a busy event loop is still observed."""

    def __init__(self, listen: str, registry: CollectorRegistry) -> None:
        host, port = parse_address(listen)
        self._server, self._thread = start_http_server(port, addr=host, registry=registry)
        self.address = f"{host}:{self._server.server_port}"

    def close(self) -> None:
        self._server.shutdown()
        self._server.server_close()
        self._thread.join(timeout=2)
