"""Limits on what one HTTP client can make the server hold, and for how long."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class HttpLimits:
    """Limits of the HTTP server: sizes in bytes, times in seconds."""

    line_bytes: int = 8 << 10
    """The maximum size of the request line (method, target, version). A longer line is answered with 414."""
    head_bytes: int = 32 << 10
    """The maximum size of request line and header fields together. A larger head is answered with 431."""
    head_fields: int = 100
    body_bytes: int = 4 << 20
    """The maximum size of a body. A larger body is answered with 413."""
    head_s: float = 10.0
    """The maximum time from a head's first byte to its last. A slower head is answered with 408."""
    arrival_s: float = 30.0
    """The maximum time from a request's first byte to its last. A slower request is answered with 408."""
    idle_s: float = 75.0
    """The maximum time from an answer to the next request."""
    write_stall_s: float = 30.0
    """The maximum time for which a client may read nothing of an answer that waits for it."""
    connections: int = 4096
