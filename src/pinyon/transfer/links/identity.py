"""Who this process is towards its peers: what every link is set up with."""

from __future__ import annotations

import ssl
from dataclasses import dataclass, field

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One process life with what it proves itself by."""

    boot_id: bytes
    secret: bytes | None = field(default=None, repr=False)
    """Cluster secret: both sides of every link prove that they know it."""
    server_tls: ssl.SSLContext | None = None
    """When given, tcp links are encrypted; both sides of a cluster have both contexts or none."""
    client_tls: ssl.SSLContext | None = None
