"""What all connections of one HTTP server share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import Gauge

from pinyon.core.errors import PinyonError
from pinyon.http.answer import Reply
from pinyon.http.budget import Budget
from pinyon.http.limits import HttpLimits
from pinyon.http.peers import Peers, TrustedProxies
from pinyon.http.request import RequestHead


class Exchange(Protocol):
    """A request whose head is known."""

    error: PinyonError | None
    """What speaks against it already, before its body is read."""
    fields: bytes
    """Header fields of whatever answer it gets: its id, and what browsers ask for."""
    holder: str
    """In whose name its bytes are held; empty: in nobody's."""
    guarded: bool
    """It costs something: limits per client are for these."""
    plain: bool
    """It is answered at once, on the event loop."""


class App(Protocol):
    """What the server serves."""

    def refusal(self, error: PinyonError, *, named: bool) -> tuple[int, bytes, bytes]:
        """Returns status, body (JSON) and header fields of the answer to what is no request of the app's yet, or not
        any more. ``named``: the answer has a request's own fields already."""
        ...

    def open(self, head: RequestHead) -> Any:
        """An :class:`Exchange`; says in it if the request is refused. Never raises."""
        ...

    def answer(self, exchange: Any, body: bytes | bytearray, reply: Reply) -> None:
        """Of a plain one."""
        ...

    def serve(self, exchange: Any, body: bytes | bytearray, reply: Reply) -> Coroutine[Any, Any, None]:
        """Of any other one; cancelled when the client leaves."""
        ...

    def refused(self, exchange: Any | None, status: int) -> None:
        """The server itself has answered; None: before there was a head."""
        ...


@dataclass(slots=True, eq=False)
class HttpState:
    app: App
    limits: HttpLimits
    budget: Budget
    gauge: Gauge
    proxies: TrustedProxies
    proxy_protocol: bool
    peer_connections: Peers
    peer_requests: Peers
    admitted: int = 0
    """Open connections that count, those without TLS yet among them where there is to be TLS."""
    lingering: int = 0
    closing: bool = False
    """Answers are the last ones on their connections."""
    date: bytes = b""
    """The header's line."""
    connections: set[Any] = field(default_factory=set)
    emptied: asyncio.Event | None = None
    """Set with the end of the last connection."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
