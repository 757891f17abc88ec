"""Accepts connections to an HTTPS server and counts them from then on: who says nothing holds a socket, too.

``create_server`` with TLS would make a connection's protocol known only after the handshake, and nobody would count
those before it.
"""

from __future__ import annotations

import asyncio
import contextlib
import socket
import ssl
from collections.abc import Coroutine
from typing import Any

from pinyon.runtime.logging import get_logger
from services.lb.http_connection import Connection
from services.lb.http_state import HttpState

__all__ = ["TlsAcceptor"]

HANDSHAKE_S = 10.0
PAUSE_S = 0.5
"""After a failure to accept, such as for want of descriptors: what is there would fail again."""

_log = get_logger("lb.http")


class TlsAcceptor:
    """``start`` → ``close``."""

    def __init__(self, shared: HttpState, tls: ssl.SSLContext) -> None:
        self._shared = shared
        self._tls = tls
        self._sockets: list[socket.socket] = []
        self._tasks: set[asyncio.Task[None]] = set()

    async def start(self, host: str, port: int, backlog: int) -> int:
        """The port. Raises :class:`OSError`."""
        loop = asyncio.get_running_loop()
        found = await loop.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
        try:
            for family, _, _, _, address in dict.fromkeys(found):
                bound = socket.create_server(address[:2], family=family, backlog=backlog)
                bound.setblocking(False)
                self._sockets.append(bound)
        except OSError:
            self._close_sockets()
            raise
        for bound in self._sockets:
            self._run(self._accept(bound))
        return int(self._sockets[0].getsockname()[1])

    async def close(self) -> None:
        """Accept no more; who has not shown by now that it speaks TLS is cut."""
        tasks = list(self._tasks)
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)
        self._close_sockets()

    def _close_sockets(self) -> None:
        for bound in self._sockets:
            bound.close()
        self._sockets.clear()

    def _run(self, work: Coroutine[Any, Any, None]) -> None:
        task = asyncio.get_running_loop().create_task(work)
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _accept(self, bound: socket.socket) -> None:
        loop = asyncio.get_running_loop()
        while True:
            try:
                client, address = await loop.sock_accept(bound)
            except OSError as error:
                _log.warning("cannot accept connections: %s", error.strerror or error)
                await asyncio.sleep(PAUSE_S)
                continue
            place = _Place(self._shared)
            if place.take(address[0]):
                self._run(self._handshake(client, place))
            else:
                client.close()  # before there is TLS nothing can be said

    async def _handshake(self, client: socket.socket, place: _Place) -> None:
        loop, shared = asyncio.get_running_loop(), self._shared
        try:
            with contextlib.suppress(OSError):  # no TLS, one that does not fit, none in time, or the client left
                await loop.connect_accepted_socket(
                    lambda: Connection(shared, loop, place.give_back),
                    client,
                    ssl=self._tls,
                    ssl_handshake_timeout=HANDSHAKE_S,
                )
        finally:
            place.give_back()


class _Place:
    """What a connection counts for until it is one."""

    def __init__(self, shared: HttpState) -> None:
        self._shared = shared
        self._peer: str | None = None
        self._taken = False

    def take(self, address: str) -> bool:
        shared = self._shared
        if shared.admitted >= shared.limits.connections:
            return False
        if not shared.proxies.trusts(address):
            self._peer = shared.peer_connections.take(address)
            if self._peer is None:
                return False
        shared.admitted += 1
        self._taken = True
        return True

    def give_back(self) -> None:
        """Calling it twice is fine."""
        if self._taken:
            self._taken = False
            self._shared.admitted -= 1
            if self._peer is not None:
                self._shared.peer_connections.give(self._peer)
