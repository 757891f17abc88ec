"""What one HTTP client can make us hold, and for how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Sizes in bytes, times in seconds."""

    line_bytes: int = 8 << 10
    """The request line: method, target, version. More: 414."""
    head_bytes: int = 32 << 10
    """Request line and header fields. More: 431."""
    head_fields: int = 100
    body_bytes: int = 4 << 20
    """More: 413."""
    head_s: float = 10.0
    """From a head's first byte to its last. Longer: 408."""
    arrival_s: float = 30.0
    """From a request's first byte to its last. Longer: 408."""
    idle_s: float = 75.0
    """From an answer to the next request."""
    write_stall_s: float = 30.0
    """How long a client may read nothing of an answer that waits for it."""
    connections: int = 4096
