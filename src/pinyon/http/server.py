"""The HTTP server: listens, keeps the connections and ends them in an orderly way."""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from email.utils import formatdate

from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.http.answer import field
from pinyon.http.connection import Connection
from pinyon.http.state import HttpState
from pinyon.http.tls_acceptor import TlsAcceptor
from pinyon.runtime.logging import get_logger

FAREWELL_S = 0.5
"""The time for the last answers to leave once the time for draining is over."""
HANDSHAKES_S = 1.0
"""The time for TLS handshakes that are under way when the server ends."""
BACKLOG = 2048

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
        self._secure = TlsAcceptor(shared, tls) if tls is not None else None
        self._date: asyncio.TimerHandle | None = None
        self._listeners = Listeners()
        self._servers: list[asyncio.Server] = []
        self._started = False

    async def start(self) -> str:
        """Binds and serves; returns ``host:port``. Raises :class:`Unavailable` if the port is taken."""
        host, port = parse_address(self._listen)
        loop = asyncio.get_running_loop()
        try:
            bound = await self._listeners.open(host, port, reuse_port=self._reuse_port)
            for each in self._listeners.sockets if self._secure is None else ():
                self._servers.append(await loop.create_server(self._connection, sock=each.dup()))
        except OSError as error:
            for server in self._servers:
                server.close()
            self._listeners.close()
            raise Unavailable(f"cannot listen on {self._listen}: {error.strerror or error}") from None
        if self._secure is not None:
            self._secure.start(self._listeners.sockets)
        self._tick()
        self._started = True
        return f"[{host}]:{bound}" if ":" in host else f"{host}:{bound}"

    @property
    def connections(self) -> set[Connection]:
        return self._shared.connections

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
        await self._accept_last(seconds)
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
        for server in self._servers:
            await server.wait_closed()
        self._servers.clear()
        if self._date is not None:
            self._date.cancel()

    async def _accept_last(self, seconds: float) -> None:
        """Stops listening and takes the connections made by then, whose requests may be under way."""
        for server in self._servers:
            server.close()
        if self._secure is not None:
            await self._secure.stop()
        clients = self._listeners.waiting()
        self._listeners.close()
        if self._secure is not None:
            for client, host in clients:
                self._secure.take(client, host)
            await self._secure.close(min(seconds, HANDSHAKES_S))
        else:
            loop = asyncio.get_running_loop()
            made = [loop.connect_accepted_socket(self._connection, client) for client, _ in clients]
            await asyncio.gather(*made, return_exceptions=True)  # an error means that the client has left

    def _connection(self) -> Connection:
        return Connection(self._shared, asyncio.get_running_loop())

    def _tick(self) -> None:
        """Renews the Date header once per second."""
        self._shared.date = field(b"date", formatdate(usegmt=True))
        self._date = asyncio.get_running_loop().call_later(1.0, self._tick)


class Listeners:
    """The sockets on which the server listens: ``open`` → ``waiting`` → ``close``.

    The server owns these sockets, and whatever accepts from them uses a duplicate. When accepting has stopped,
    connections that the kernel had made by then can still be taken from here. Closing would otherwise reset them, and a
    client that came in time could not know whether its request was served.
    """

    def __init__(self) -> None:
        self.sockets: list[socket.socket] = []

    async def open(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listens on all addresses of the host; returns the port. Raises :class:`OSError`, and then holds no socket."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                bound = socket.create_server(address[:2], family=family, backlog=BACKLOG, reuse_port=reuse_port)
                self.sockets.append(bound)
                bound.setblocking(False)
        except OSError:
            self.close()
            raise
        return int(self.sockets[0].getsockname()[1])

    def waiting(self) -> list[tuple[socket.socket, str]]:
        """Returns the connections not yet accepted, with the client's host: at most a backlog of each socket."""
        clients = []
        for bound in self.sockets:
            with suppress(OSError):  # BlockingIOError: there is none left; others: no descriptors are left
                for _ in range(BACKLOG):
                    client, address = bound.accept()
                    client.setblocking(False)
                    clients.append((client, str(address[0])))
        return clients

    def close(self) -> None:
        for bound in self.sockets:
            bound.close()
        self.sockets.clear()
