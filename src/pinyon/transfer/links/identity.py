"""Who this process is towards its peers: what every link is set up with."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from pinyon.transfer.links.tls import TlsContexts

__all__ = ["Identity"]


@dataclass(frozen=True, slots=True)
class Identity:
    """One process life with what it proves itself by."""

    boot_id: bytes
    secret: bytes | None = field(default=None, repr=False)
    """Cluster secret: both sides of every link prove that they know it."""
    tls: TlsContexts | None = None
    """When given, tcp links are encrypted; the whole cluster has it or nobody."""
