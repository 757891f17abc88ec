"""The HTTP server: listens, keeps the connections and ends them in an orderly way."""

from __future__ import annotations

import asyncio
import ssl
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate

from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.http.acceptor import ConnectionAcceptor
from pinyon.http.answer import field
from pinyon.http.state import HttpState
from pinyon.runtime.logging import get_logger

FAREWELL_S = 0.5
"""The time for the last answers to leave once the time for draining is over."""
HANDSHAKES_S = 1.0
"""The time for TLS handshakes that are under way when the server ends."""

_log = get_logger("lb.http")


class HttpServer:
    """An HTTP server, used in this order: ``start`` → ``announce`` → ``drain``."""

    def __init__(
        self,
        shared: HttpState,
        listen: str,
        tls: Callable[[], ssl.SSLContext] | None = None,
        *,
        reuse_port: bool = False,
    ) -> None:
        """Takes ``tls``, which returns a context per connection; ``reuse_port`` lets other processes listen too."""
        if tls is not None and shared.proxy_protocol:
            raise InvalidArgument("a PROXY header cannot come before TLS: give one of the two", field="proxy_protocol")
        self._shared = shared
        self._listen = listen
        self._reuse_port = reuse_port
        self._acceptor = ConnectionAcceptor(shared, tls)
        self._date: asyncio.TimerHandle | None = None
        self._started = False

    async def start(self) -> str:
        """Binds and serves; returns ``host:port``. Raises :class:`Unavailable` if the port is taken."""
        host, port = parse_address(self._listen)
        try:
            bound = await self._acceptor.open(host, port, reuse_port=self._reuse_port)
        except OSError as error:
            raise Unavailable(f"cannot listen on {self._listen}: {error.strerror or error}") from None
        self._tick()
        self._started = True
        return f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    def announce(self) -> None:
        """Makes each answer the last one on its connection, so that clients leave in time; all are still served."""
        self._shared.closing = True

    async def drain(self, seconds: float) -> None:
        """Stops accepting, lets requests finish for ``seconds``, then cancels them and closes all connections."""
        if not self._started:
            return
        self._started = False
        shared = self._shared
        shared.closing = True
        await self._acceptor.close(min(seconds, HANDSHAKES_S))
        for connection in list(shared.connections):
            connection.shutdown()  # idle ones close, the others do so after their answer
        tasks = shared.tasks
        if shared.connections and seconds > 0:
            shared.emptied = asyncio.Event()
            with suppress(TimeoutError):
                await asyncio.wait_for(shared.emptied.wait(), seconds)
        if tasks:
            _log.warning("%d requests are cut off at the end of the drain", len(tasks))
        for connection in list(shared.connections):
            connection.end()
        if tasks:
            await asyncio.wait(list(tasks), timeout=FAREWELL_S)
        for connection in list(shared.connections):
            connection.abort()
        if tasks:
            await asyncio.wait(list(tasks))
        if self._date is not None:
            self._date.cancel()

    def _tick(self) -> None:
        """Renews the Date header once per second."""
        self._shared.date = field(b"date", formatdate(usegmt=True))
        self._date = asyncio.get_running_loop().call_later(1.0, self._tick)
