"""State that all connections of one HTTP server share."""

from __future__ import annotations

import asyncio
from collections.abc import Coroutine
from dataclasses import dataclass, field
from typing import Any, Protocol

from prometheus_client import Gauge

from pinyon.core.errors import PinyonError
from pinyon.http.answer import Reply
from pinyon.http.budget import Budget, HttpLimits
from pinyon.http.peers import PeerPlaces, TrustedProxies
from pinyon.http.request import RequestHead


class Exchange(Protocol):
    """A request whose head is known."""

    error: PinyonError | None
    """The reason to refuse the request, known before its body is read; None if there is none."""
    fields: bytes
    """Header fields of any answer to the request: its id and the fields that browsers ask for."""
    holder: str
    """The name on whose account the request's bytes are held; empty for no account."""
    guarded: bool
    """True for a costly request, to which limits per client apply."""
    plain: bool
    """True for a request that is answered at once, on the event loop."""


class App(Protocol):
    """The application that the server serves."""

    def refusal(self, error: PinyonError, *, named: bool) -> tuple[int, bytes, bytes]:
        """Returns status, body (JSON) and header fields of an answer to a request that the app does not handle now.

        The app does not have the request yet, or not any more. ``named``: the answer already has a request's own
        fields."""
        ...

    def open(self, head: RequestHead) -> Any:
        """Returns an :class:`Exchange`, whose ``error`` is set if the request is refused. Never raises."""
        ...

    def answer(self, exchange: Any, body: bytes | bytearray, reply: Reply) -> None:
        """Answers a plain request at once."""
        ...

    def serve(self, exchange: Any, body: bytes | bytearray, reply: Reply) -> Coroutine[Any, Any, None]:
        """Answers any other request; the coroutine is cancelled when the client leaves."""
        ...

    def refused(self, exchange: Any | None, status: int) -> None:
        """Learns that the server itself has answered; ``exchange`` is None if there was no head yet."""
        ...


@dataclass(slots=True, eq=False)
class HttpState:
    app: App
    limits: HttpLimits
    budget: Budget
    gauge: Gauge
    proxies: TrustedProxies
    proxy_protocol: bool
    peer_connections: PeerPlaces
    peer_requests: PeerPlaces
    admitted: int = 0
    """The number of open connections that count against the limit; with TLS also those before the handshake."""
    lingering: int = 0
    closing: bool = False
    """True once each answer is the last one on its connection."""
    date: bytes = b""
    """The complete line of the Date header."""
    connections: set[Any] = field(default_factory=set)
    emptied: asyncio.Event | None = None
    """An event that is set when the last connection ends."""
    tasks: set[asyncio.Task[None]] = field(default_factory=set)
