"""Access to a local cluster's services from outside: plain, or with the certificates made for the cluster."""

from __future__ import annotations

import http.client
import ssl
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import grpc

from launch.process import ServiceProcess
from pinyon.runtime.channel import client_channel
from pinyon.runtime.identity import ADMIN, CONDUCTOR, CONTROLLER, KVSTORE, LB, WORKER, peer_name
from pinyon.runtime.security import read_secret


def role_of(name: str) -> str:
    """Returns the role of the service with that name in a local cluster."""
    kind = name.rpartition("-")[0] or name
    return kind if kind in (CONDUCTOR, CONTROLLER, KVSTORE, LB) else WORKER


@dataclass(frozen=True)
class SuiteAccess:
    """The way to reach a cluster's services. Instance ids begin with ``prefix``."""

    root: Path | None = None
    """The folder of the certificates; None for a plain cluster."""
    prefix: str = ""

    def folder(self, role: str, instance_id: str) -> Path | None:
        """Returns the folder of a process's certificate files; None in a plain cluster."""
        return None if self.root is None else self.root / role / instance_id

    @property
    def admin(self) -> Path | None:
        return self.folder(ADMIN, "admin")

    @property
    def authority(self) -> Path | None:
        """The file that clients of the load balancers trust."""
        return None if self.root is None else self.root / "ca" / "ca.crt"

    @property
    def secret(self) -> bytes:
        """The secret from which block keys are derived; empty in a plain cluster."""
        return b"" if self.root is None else read_secret(self.root / "ca" / "cluster.secret")

    def channel(self, service: ServiceProcess, role: str = ADMIN, kind: Any = grpc) -> Any:
        """Returns a channel as an admin, or as the first instance of another role that has a certificate.

        It is one of ``kind``: ``grpc``, or ``grpc.aio`` for an event loop."""
        name = peer_name(role_of(service.name), self.prefix + service.name)
        return client_channel(service.endpoints["grpc"], name, None if self.root is None else self.first(role), kind)

    def http(self, service: ServiceProcess, timeout_s: float) -> http.client.HTTPConnection:
        """Returns a connection to a load balancer; the caller closes it."""
        address = service.endpoints["http"]
        if (context := self.ssl_context()) is None:
            return http.client.HTTPConnection(address, timeout=timeout_s)
        return http.client.HTTPSConnection(address, timeout=timeout_s, context=context)

    def ssl_context(self) -> ssl.SSLContext | None:
        """Returns the TLS context for HTTP clients of the load balancers; None if those speak plain HTTP."""
        return None if self.authority is None else ssl.create_default_context(cafile=str(self.authority))

    def first(self, role: str) -> Path:
        """Returns the folder of the first instance with that role; there are certificates."""
        assert self.root is not None
        return next(path for path in sorted((self.root / role).iterdir()) if path.is_dir())
