"""The life of a service process: loop, signals, logs, telemetry, metrics, the ready announcement."""

from __future__ import annotations

import asyncio
import ctypes
import faulthandler
import json
import os
import secrets
import signal
import sys
from collections.abc import Awaitable, Callable
from dataclasses import dataclass, field
from typing import TypeVar

import uvloop
from prometheus_client import CollectorRegistry

from pinyon.core.errors import PinyonError
from pinyon.runtime.logging import configure_logging, get_logger
from pinyon.runtime.metrics import MetricsServer, new_registry, show_certificate
from pinyon.runtime.process import tune_process
from pinyon.runtime.security import NO_SECURITY, Security, load_security
from pinyon.runtime.settings import ServiceSettings
from pinyon.runtime.telemetry import Telemetry
from pinyon.runtime.watch import FileWatch

Settings = TypeVar("Settings", bound=ServiceSettings)

_PR_SET_PDEATHSIG = 1
_log = get_logger("service")


def die_with_parent(parent_pid: int) -> None:
    """Asks the kernel for SIGTERM when the parent process ends, even if it is killed (Linux prctl).

    ``parent_pid`` closes the race: if the parent died before this call, the process ends now."""
    ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_PDEATHSIG, signal.SIGTERM)
    if os.getppid() != parent_pid:
        raise SystemExit("the starting process is gone")


@dataclass
class ServiceContext:
    """The context that ``main`` of a service gets besides its settings."""

    service: str
    instance_id: str
    telemetry: Telemetry
    registry: CollectorRegistry
    stopping: asyncio.Event
    security: Security = NO_SECURITY
    files: FileWatch = field(default_factory=FileWatch)
    """The watch over files that may change, which runs as long as the process."""
    ready_fd: int = -1
    endpoints: dict[str, str] = field(default_factory=dict)

    def ready(self, endpoints: dict[str, str]) -> None:
        """Announces the bound endpoints by name, as one JSON line on ``ready_fd`` and in the log, once all is built."""
        tune_process()
        self.endpoints.update(endpoints)
        line = {"service": self.service, "instance_id": self.instance_id, "pid": os.getpid(), **self.endpoints}
        _log.info("ready", extra=dict(self.endpoints))
        if self.ready_fd >= 0:
            try:
                os.write(self.ready_fd, (json.dumps(line) + "\n").encode())
                os.close(self.ready_fd)
            except OSError as error:
                _log.warning("cannot announce readiness: %s", error)
            self.ready_fd = -1


async def _run(
    settings: Settings,
    service: str,
    main: Callable[[Settings, ServiceContext], Awaitable[None]],
    make_registry: Callable[[], CollectorRegistry],
) -> None:
    files = FileWatch()
    if settings.has_tls:  # added before the files are read, so that no change is missed
        files.add("certificate", settings.tls_paths, lambda: security.renew(), lambda _: None)
    security = load_security(settings, settings.certified_role())
    certified = "" if security.tls is None else security.tls.material.identity.instance_id
    instance_id = settings.instance_id or certified or f"{service}-{secrets.token_hex(3)}"
    configure_logging(service, instance_id, settings.log_level, settings.log_format)
    for exposed in settings.exposed():
        _log.warning("%s; --allow-insecure was given", exposed)
    registry = make_registry()
    telemetry = Telemetry(service, instance_id, settings.otlp_endpoint)
    if (tls := security.tls) is not None:
        show_certificate(registry, lambda: tls.material.not_after_s)
    context = ServiceContext(
        service, instance_id, telemetry, registry, asyncio.Event(), security, files, settings.ready_fd
    )
    metrics = MetricsServer(settings.metrics_listen, registry, security) if settings.metrics_listen else None
    if metrics is not None:
        context.endpoints["metrics"] = metrics.address
    loop = asyncio.get_running_loop()
    for number in (signal.SIGTERM, signal.SIGINT):
        loop.add_signal_handler(number, context.stopping.set)
    files.start()
    try:
        await main(settings, context)
    finally:
        await files.close()
        if metrics is not None:
            await asyncio.to_thread(metrics.close)
        await asyncio.to_thread(telemetry.close)
        _log.info("stopped")


def run_service(
    settings: Settings,
    main: Callable[[Settings, ServiceContext], Awaitable[None]],
    make_registry: Callable[[], CollectorRegistry] = new_registry,
) -> None:
    """Runs one service until SIGTERM or SIGINT. A :class:`PinyonError` during start-up ends it with status 1.

    ``make_registry`` makes the registry of metrics, by default with the process's own."""
    faulthandler.enable()
    service = settings.service()
    parent = os.environ.pop("PINYON_PARENT_PID", "")
    if parent.isdecimal():
        die_with_parent(int(parent))
    # The engine thread holds the GIL in short Python stretches, and the loop must not wait 5 ms for each.
    sys.setswitchinterval(0.001)
    try:
        uvloop.run(_run(settings, service, main, make_registry))
    except PinyonError as error:
        sys.stderr.write(f"pinyon {service}: {settings.in_words(error, settings.certified_role())}\n")
        raise SystemExit(1) from None
