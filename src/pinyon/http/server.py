"""The HTTP server: listens, keeps the connections that it accepts, and ends them in an orderly way.

With TLS, a connection counts from the start, not only once its handshake is done: a silent client holds a socket too.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, suppress
from email.utils import formatdate

from pinyon.core.address import parse_address
from pinyon.core.errors import InvalidArgument, Unavailable
from pinyon.http.answer import field
from pinyon.http.connection import ServerConnection
from pinyon.http.state import HttpState
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

BACKLOG = 2048
ACCEPTED_AT_ONCE = 64
"""The connections accepted in one turn of the loop; then other tasks run."""
HANDSHAKE_S = 10.0
PAUSE_S = 0.5
"""The pause after a failure to accept, such as for lack of descriptors: an immediate retry would fail again."""
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
        self._tls = tls
        self._bound: list[socket.socket] = []
        self._entering: set[asyncio.Task[None]] = set()
        """The tasks of connections that are made, with TLS those of handshakes."""
        self._date: asyncio.TimerHandle | None = None
        self._started = False

    async def start(self) -> str:
        """Serves on all addresses of the host; returns ``host:port``. Raises :class:`Unavailable` for a taken port."""
        host, port = parse_address(self._listen)
        loop = asyncio.get_running_loop()
        try:
            found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                bound = socket.create_server(address[:2], family=family, backlog=BACKLOG, reuse_port=self._reuse_port)
                self._bound.append(bound)
                bound.setblocking(False)
        except OSError as error:
            for bound in self._bound:
                bound.close()
            self._bound.clear()
            raise Unavailable(f"cannot listen on {self._listen}: {error.strerror or error}") from None
        for bound in self._bound:
            self._watch(bound)
        self._tick()
        self._started = True
        port = int(self._bound[0].getsockname()[1])
        return f"[{host}]:{port}" if ":" in host else f"{host}:{port}"

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
        await self._close(min(seconds, HANDSHAKES_S))
        for connection in list(shared.connections):
            connection.shutdown()  # idle connections close now, the others after their answer
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

    # -- connections that come

    async def _close(self, seconds: float) -> None:
        """Stops listening and takes the connections that the kernel has completed by then. Closing would otherwise
        reset them, and a client that came in time could not know whether its request was served.

        Handshakes that are under way may take up to ``seconds``."""
        listening, self._bound = self._bound, []
        for bound in listening:
            asyncio.get_running_loop().remove_reader(bound)
            self._accept(bound, BACKLOG)
            bound.close()
        if self._entering and (seconds > 0 or self._tls is None):
            await asyncio.wait(list(self._entering), timeout=None if self._tls is None else seconds)
        await ended(*self._entering)

    def _watch(self, bound: socket.socket) -> None:
        if bound in self._bound:
            asyncio.get_running_loop().add_reader(bound, self._accept, bound)

    def _accept(self, bound: socket.socket, most: int = ACCEPTED_AT_ONCE) -> None:
        for _ in range(most):
            try:
                client, address = bound.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue
            except OSError as error:
                _log.warning("cannot accept connections: %s", error.strerror or error)
                loop = asyncio.get_running_loop()
                loop.remove_reader(bound)
                loop.call_later(PAUSE_S, self._watch, bound)
                return
            self._enter(client, str(address[0]))

    def _enter(self, client: socket.socket, host: str) -> None:
        """Makes an accepted connection, or closes it if a limit is reached before its handshake."""
        client.setblocking(False)
        place = ExitStack() if self._tls is None else self._place(host)
        if place is None:
            client.close()  # before the handshake no answer can be sent
            return
        task = asyncio.get_running_loop().create_task(self._connect(client, place))
        self._entering.add(task)
        task.add_done_callback(self._entering.discard)

    def _place(self, host: str) -> ExitStack | None:
        """Takes the place of a connection in the limits until its handshake is done. Returns a stack that gives the
        place back once; None if there is no place."""
        shared, place = self._shared, ExitStack()
        if shared.admitted >= shared.limits.connections:
            return None
        if not shared.proxies.trusts(host):
            peer = shared.peer_connections.take(host)
            if peer is None:
                return None
            place.callback(shared.peer_connections.give, peer)
        shared.admitted += 1
        place.callback(self._leave)
        return place

    def _leave(self) -> None:
        self._shared.admitted -= 1

    async def _connect(self, client: socket.socket, place: ExitStack) -> None:
        loop, shared, tls = asyncio.get_running_loop(), self._shared, self._tls
        with place, suppress(OSError):  # no TLS, a mismatch, no handshake in time, or the client left
            await loop.connect_accepted_socket(
                lambda: ServerConnection(shared, loop, place.close),
                client,
                ssl=None if tls is None else tls(),
                ssl_handshake_timeout=None if tls is None else HANDSHAKE_S,
            )
