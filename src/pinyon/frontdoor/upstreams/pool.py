"""The connections to one server: those in use are counted, and idle ones wait a while for the next request."""

from __future__ import annotations

import asyncio
import ssl

from pinyon.frontdoor.answer import Answer
from pinyon.frontdoor.failures import Absent, Broke, ConnectionsFull
from pinyon.frontdoor.upstreams.connection import ConnectionLimits, UpstreamConnection
from pinyon.frontdoor.upstreams.url import UpstreamUrl

STALE_S = 1.0
"""The time after a request within which a kept connection that breaks without a byte was closed before the request."""


class ConnectionPool:
    """The pool, on one event loop. ``close`` ends all connections."""

    def __init__(
        self, url: UpstreamUrl, limits: ConnectionLimits, most: int, tls: ssl.SSLContext | None = None
    ) -> None:
        """Creates a pool of at most ``most`` connections; ``tls`` is for https."""
        self._url = url
        self._limits = limits
        self._most = most
        self._tls = tls
        self._idle: list[UpstreamConnection] = []
        """The idle connections. The one used last is at the end and used next, so that surplus ones age."""
        self._open: set[UpstreamConnection] = set()
        self._connecting = 0
        self.made = 0
        """The number of connections ever made."""
        self._breaks = 0
        """The number of times that unanswered requests were broken off."""
        self._closed = False

    @property
    def open(self) -> int:
        """The number of open connections."""
        return len(self._open)

    async def send(self, head: bytes, body: bytes | bytearray, first_byte_s: float) -> Answer:
        """Sends a request and returns when the answer's head is here. The caller closes the answer.

        Raises :class:`Absent` if the server is not there and :class:`ConnectionsFull` if there are too many
        connections; then nothing was sent. Raises :class:`Broke` if the answer does not come, or is invalid."""
        loop = asyncio.get_running_loop()
        broke: Broke | None = None
        while True:
            kept = None if broke is not None else self._take()
            try:
                connection = await self._connect(loop) if kept is None else kept
            except (Absent, ConnectionsFull):
                if broke is not None:
                    raise broke from None  # the request was sent, and may have ended the server
                raise
            sent_s, breaks = loop.time(), self._breaks
            answer = connection.send(head, body, first_byte_s)
            try:
                await answer.head()
                return answer
            except Broke as error:
                if broke is not None:
                    error.sends = 2  # the request may have ended two of a server's processes
                if kept is None or error.begun or loop.time() - sent_s > STALE_S or breaks != self._breaks:
                    raise
                broke = error

    def drop_idle(self) -> None:
        """Closes idle connections, as another process is there now."""
        for connection in list(self._idle):
            connection.close()
        self._idle.clear()

    def break_unanswered(self) -> None:
        """Breaks every request that has had no byte of an answer."""
        self._breaks += 1
        for connection in list(self._open):
            connection.break_unanswered()

    def close(self) -> None:
        self._closed = True
        for connection in list(self._open):
            connection.close()
        self._idle.clear()

    def _take(self) -> UpstreamConnection | None:
        while self._idle:
            connection = self._idle.pop()
            if connection.usable:
                return connection
            connection.close()
        return None

    async def _connect(self, loop: asyncio.AbstractEventLoop) -> UpstreamConnection:
        if self._closed:
            raise Absent("The load balancer is shutting down.")
        if len(self._open) + self._connecting >= self._most:
            raise ConnectionsFull("There are too many connections to the server.", retry_after_s=1.0)
        url = self._url
        self._connecting += 1
        try:
            async with asyncio.timeout(self._limits.connect_s):
                _, connection = await loop.create_connection(
                    lambda: UpstreamConnection(loop, self._limits, self._ended),
                    url.host,
                    url.port,
                    ssl=self._tls if url.tls else None,
                    server_hostname=url.host if url.tls else None,
                )
        except TimeoutError:
            raise Absent(
                f"No connection to the server could be made in {self._limits.connect_s:g} s.", silent=True
            ) from None
        except (OSError, UnicodeError) as error:  # includes errors of ssl
            raise Absent("No connection to the server could be made.") from error
        finally:
            self._connecting -= 1
        self._open.add(connection)
        self.made += 1
        if self._closed or not connection.usable:
            connection.close()
            raise Absent("The server closed the connection at once.")
        return connection

    def _ended(self, connection: UpstreamConnection, more: bool) -> None:
        """Takes back a connection after a request, or drops one that has closed."""
        if not more:
            self._open.discard(connection)
            if connection in self._idle:
                self._idle.remove(connection)
        elif self._closed or not connection.usable:
            connection.close()
        else:
            self._idle.append(connection)
