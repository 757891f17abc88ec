"""The client at the other end of a connection, and what is counted against its address."""

from __future__ import annotations

import asyncio
import socket
from typing import Any, cast

from pinyon.http.answer import HttpError
from pinyon.http.peers import BLOCK_MAX, read_proxy_line
from pinyon.http.request import RequestHead
from pinyon.http.state import HttpState

LOOK_S = 0.01
LOOK_MAX_S = 1.0
"""The longest wait between two looks; it starts at ``LOOK_S`` and doubles each time."""
TCP_CLOSE = 7
"""The ``tcpi_state`` of a connection that was reset (Linux)."""


class Visitor:
    """A connection's client: ``arrive``, then ``ask`` and ``answered`` for each costly request, then ``leave``."""

    __slots__ = ("_connection", "_request", "_shared", "_socket", "_timer", "_transport", "_trusted", "_wait_s",
                 "address", "preface")  # fmt: skip

    def __init__(self, shared: HttpState, transport: asyncio.BaseTransport) -> None:
        self._shared = shared
        self._transport = cast("asyncio.Transport", transport)
        self._socket: Any = None
        """The socket, or uvloop's stand-in for it; None if it is not one of TCP."""
        self._timer: asyncio.Handle | None = None
        """The timer of the next look at a client that sends no more."""
        self._wait_s = LOOK_S
        self._trusted = False
        self._connection: str | None = None
        self._request: str | None = None
        self.preface: bytes | None = None
        """The bytes of the PROXY header so far; None if no header is expected or it has been read."""
        self.address = ""
        sock = transport.get_extra_info("socket")
        if sock is not None and sock.family in (socket.AF_INET, socket.AF_INET6):
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            # A peer that acknowledges no data for this long is dead, also after its answer was written.
            stall_ms = int(shared.limits.write_stall_s * 1e3)
            sock.setsockopt(socket.IPPROTO_TCP, socket.TCP_USER_TIMEOUT, stall_ms)
            self._socket = sock
            self.address = (transport.get_extra_info("peername") or ("",))[0]

    def arrive(self) -> None:
        """Takes a place for the connection. Raises :class:`HttpError` if the address has too many connections."""
        shared = self._shared
        self._trusted = shared.proxies.trusts(self.address)
        if self._trusted and shared.proxy_protocol:
            self.preface = b""
        else:
            self._take()

    def _take(self) -> None:
        if self._trusted or not self.address:
            return  # a proxy's connections belong to many clients
        self._connection = self._shared.peer_connections.take(self.address)
        if self._connection is None:
            raise HttpError(503, "Too many connections from this address.", retry_after_s=1.0)

    def introduce(self, data: bytes) -> bytes:
        """Reads the PROXY header and returns the bytes that follow it. Raises :class:`HttpError`."""
        data = (self.preface or b"") + data
        line = read_proxy_line(data[:BLOCK_MAX])
        if line is None:
            self.preface = data
            return b""
        self.preface = None
        address, size = line
        if address:
            self.address = address
            self._trusted = self._shared.proxies.trusts(address)
            self._take()
        return data[size:]

    def ask(self, head: RequestHead) -> None:
        """Takes a place for a request. Raises :class:`HttpError` if the client behind a trusted proxy has too many."""
        if not self._trusted:
            return  # a connection has one request at a time, and connections are counted
        self._request = self._shared.peer_requests.take(self._shared.proxies.client(self.address, head.fields))
        if self._request is None:
            raise HttpError(429, "Too many requests at once from this address.", retry_after_s=1.0)

    def answered(self) -> None:
        """Gives back the place that :meth:`ask` took."""
        if self._request is not None:
            self._shared.peer_requests.give(self._request)
            self._request = None

    def end(self, loop: asyncio.AbstractEventLoop) -> bool:
        """Starts to watch a client that sends no more; returns whether its leaving would end the connection.

        TCP says the same of a client that closed its socket and of one that only shut its sending side. They differ
        when bytes arrive: the kernel of a closed socket answers with a reset. So the owner sends something, and the
        watch looks at the connection. With TLS, the watch cannot tell, as ending one side ends the connection."""
        if not self.ended and self._socket is not None and self._transport.get_extra_info("ssl_object") is None:
            self._timer = loop.call_soon(self._look)
        return self.ended

    @property
    def ended(self) -> bool:
        return self._timer is not None

    def leave(self) -> None:
        self.answered()
        if self._timer is not None:
            self._timer.cancel()
        if self._connection is not None:
            self._shared.peer_connections.give(self._connection)
            self._connection = None

    def _look(self) -> None:
        try:
            dead = self._socket.getsockopt(socket.IPPROTO_TCP, socket.TCP_INFO, 1)[0] == TCP_CLOSE
        except OSError:
            dead = True
        if dead:
            self._transport.abort()
            return
        self._timer = asyncio.get_running_loop().call_later(self._wait_s, self._look)
        self._wait_s = min(2 * self._wait_s, LOOK_MAX_S)
