"""Accepts connections to an HTTPS server and counts them from the start, since a silent client holds a socket too.

``create_server`` with TLS would make a connection's protocol known only after the handshake, so that connections before
it would not be counted.
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable, Coroutine, Iterable
from contextlib import ExitStack, suppress
from typing import Any

from pinyon.http.connection import Connection
from pinyon.http.state import HttpState
from pinyon.runtime.logging import get_logger
from pinyon.runtime.tasks import ended

HANDSHAKE_S = 10.0
PAUSE_S = 0.5
"""The pause after a failure to accept, such as for lack of descriptors: an immediate retry would fail again."""

_log = get_logger("lb.http")


class TlsAcceptor:
    """An acceptor of TLS connections: ``start`` → ``stop`` → ``close``."""

    def __init__(self, shared: HttpState, tls: Callable[[], ssl.SSLContext]) -> None:
        """Creates an acceptor; ``tls`` returns the context for each new connection."""
        self._shared = shared
        self._tls = tls
        self._accepting: set[asyncio.Task[None]] = set()
        self._handshakes: set[asyncio.Task[None]] = set()

    def start(self, listeners: Iterable[socket.socket]) -> None:
        for bound in listeners:
            self._run(self._accept(bound), self._accepting)

    async def stop(self) -> None:
        await ended(*self._accepting)

    async def close(self, seconds: float) -> None:
        """Waits up to ``seconds`` for the handshakes that are under way, then ends them."""
        if self._handshakes and seconds > 0:
            await asyncio.wait(list(self._handshakes), timeout=seconds)
        await ended(*self._handshakes)

    def take(self, client: socket.socket, host: str) -> None:
        """Starts the handshake of an accepted connection, or closes it if a limit is reached."""
        place = self._place(host)
        if place is not None:
            self._run(self._handshake(client, place), self._handshakes)
        else:
            client.close()  # before the handshake no answer can be sent

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

    def _run(self, work: Coroutine[Any, Any, None], tasks: set[asyncio.Task[None]]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        tasks.add(task)
        task.add_done_callback(tasks.discard)

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(bound)
            except OSError as error:
                _log.warning("cannot accept connections: %s", error.strerror or error)
                await asyncio.sleep(PAUSE_S)
                continue
            self.take(client, address[0])

    async def _handshake(self, client: socket.socket, place: ExitStack) -> None:
        loop, shared = asyncio.get_running_loop(), self._shared
        with place, suppress(OSError):  # no TLS, a mismatch, no handshake in time, or the client left
            await loop.connect_accepted_socket(
                lambda: Connection(shared, loop, place.close),
                client,
                ssl=self._tls(),
                ssl_handshake_timeout=HANDSHAKE_S,
            )
