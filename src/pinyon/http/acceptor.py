"""The sockets on which the HTTP server listens, and the connections that it accepts there.

With TLS, a connection counts from the start, not only once its handshake is done: a silent client holds a socket too.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import ExitStack, suppress

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

_log = get_logger("lb.http")


class ConnectionAcceptor:
    """An acceptor of connections: ``open`` → ``close``."""

    def __init__(self, shared: HttpState, tls: Callable[[], ssl.SSLContext] | None) -> None:
        """Creates an acceptor; ``tls`` returns the context for each new connection."""
        self._shared = shared
        self._tls = tls
        self._bound: list[socket.socket] = []
        self._entering: set[asyncio.Task[None]] = set()
        """The tasks of connections that are made, with TLS those of handshakes."""

    async def open(self, host: str, port: int, *, reuse_port: bool = False) -> int:
        """Listens on all addresses of the host; returns the port. Raises :class:`OSError`, and then holds no socket."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                bound = socket.create_server(address[:2], family=family, backlog=BACKLOG, reuse_port=reuse_port)
                self._bound.append(bound)
                bound.setblocking(False)
        except OSError:
            for bound in self._bound:
                bound.close()
            self._bound.clear()
            raise
        for bound in self._bound:
            self._watch(bound)
        return int(self._bound[0].getsockname()[1])

    async def close(self, seconds: float) -> None:
        """Stops listening and takes the connections that the kernel has made by then. Closing would otherwise reset
        them, and a client that came in time could not know whether its request was served.

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
        """Takes the place of a connection in the limits until its handshake is done, and returns what gives it back,
        once; None if there is none."""
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
