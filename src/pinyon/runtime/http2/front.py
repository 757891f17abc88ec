"""One port for both: connections of this implementation's clients are served in the event loop, all others by grpcio,
which listens on a port of its own on loopback.

A client is told apart by its first bytes, which are looked at and left where they are
(:mod:`pinyon.runtime.http2.hello`).
"""

from __future__ import annotations

import asyncio
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress

from pinyon.core.address import parse_address
from pinyon.runtime.http2.hello import ALPN, LOOK_BYTES, Speaker, who_speaks, who_speaks_tls
from pinyon.runtime.http2.relay import relay
from pinyon.runtime.http2.server import Http2Server
from pinyon.runtime.logging import get_logger

__all__ = ["Front"]

BACKLOG = 2048
ACCEPTED_AT_ONCE = 64
"""Then others have their turn."""
PAUSE_S = 0.5
"""After a failure to accept, such as for want of descriptors: what is there would fail again."""
AGAIN_S = 0.01
"""Until what has come in part is looked at again: it can be read all the time, so nobody says when more is there."""

_log = get_logger("http2")


class Front:
    """``open`` → ``stop``, which accepts no more → ``close``, which ends what is left."""

    def __init__(
        self,
        server: Http2Server,
        behind: str,
        *,
        connections_max: int,
        hello_s: float,
        tls: Callable[[], ssl.SSLContext] | None = None,
    ) -> None:
        """``behind`` is where grpcio listens; ``tls`` gives the context for a connection that is made now. A client
        that has not said within ``hello_s`` who it is is closed."""
        self._server = server
        self._behind = parse_address(behind)
        self._connections_max = connections_max
        self._hello_s = hello_s
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        """Who has not said yet who it is, and what ends that."""
        self._tasks: set[asyncio.Task[None]] = set()
        self.connections = 0

    def open(self, listen: str) -> int:
        """Listen; the port. Raises :class:`OSError`."""
        host, port = parse_address(listen)
        try:
            found = socket.getaddrinfo(host or None, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
            for family, _, _, _, address in dict.fromkeys(found):
                port = port or (self._listening[0].getsockname()[1] if self._listening else 0)
                both = family == socket.AF_INET6 and host == "::" and socket.has_dualstack_ipv6()  # as grpcio does
                bound = socket.create_server(
                    (str(address[0]), port), family=family, backlog=BACKLOG, dualstack_ipv6=both
                )
                bound.setblocking(False)
                self._listening.append(bound)
        except OSError:
            self.stop()
            raise
        for bound in self._listening:
            self._loop.add_reader(bound, self._accept, bound)
        return int(self._listening[0].getsockname()[1])

    def stop(self) -> None:
        for bound in self._listening:
            self._loop.remove_reader(bound)
            bound.close()
        self._listening.clear()
        for client in list(self._waiting):
            self._drop(client)

    async def close(self) -> None:
        self.stop()
        for task in list(self._tasks):
            task.cancel()
        if self._tasks:
            await asyncio.wait(list(self._tasks))

    # -- who comes

    def _accept(self, bound: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, _ = bound.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue
            except OSError as error:
                _log.warning("cannot accept connections: %s", error.strerror or error)
                self._loop.remove_reader(bound)
                self._loop.call_later(PAUSE_S, self._accept_again, bound)
                return
            if self.connections >= self._connections_max:
                client.close()
                continue
            client.setblocking(False)
            self.connections += 1
            self._waiting[client] = self._loop.call_later(self._hello_s, self._drop, client)
            self._look(client)

    def _accept_again(self, bound: socket.socket) -> None:
        if bound in self._listening:
            self._loop.add_reader(bound, self._accept, bound)

    def _drop(self, client: socket.socket) -> None:
        """Who was not heard out."""
        timer = self._waiting.pop(client, None)
        if timer is not None:
            timer.cancel()
            self._loop.remove_reader(client)
            client.close()
            self._over()

    def _over(self) -> None:
        self.connections -= 1

    def _look(self, client: socket.socket) -> None:
        if client not in self._waiting:
            return
        try:
            data = client.recv(LOOK_BYTES, socket.MSG_PEEK)
        except (BlockingIOError, InterruptedError):
            self._loop.add_reader(client, self._look, client)
            return
        except OSError:
            data = b""
        self._loop.remove_reader(client)
        if not data:
            self._drop(client)
            return
        speaker = who_speaks(data) if self._tls is None else who_speaks_tls(data, ALPN.encode())
        if speaker is Speaker.UNKNOWN:
            self._loop.call_later(AGAIN_S, self._look, client)
            return
        self._waiting.pop(client).cancel()
        task = self._loop.create_task(self._serve(client) if speaker is Speaker.OURS else self._relay(client))
        self._tasks.add(task)
        task.add_done_callback(self._tasks.discard)

    async def _serve(self, client: socket.socket) -> None:
        made = False

        def protocol() -> asyncio.Protocol:
            nonlocal made
            made = True
            return self._server.protocol(self._over)

        try:
            with suppress(OSError):  # no TLS that fits, none in time, or the client left
                client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
                if self._tls is None:
                    await self._loop.connect_accepted_socket(protocol, client)
                else:
                    await self._loop.connect_accepted_socket(
                        protocol, client, ssl=self._tls(), ssl_handshake_timeout=self._hello_s
                    )
        finally:
            if not made:
                client.close()
                self._over()

    async def _relay(self, client: socket.socket) -> None:
        try:
            await relay(client, self._behind)
        finally:
            client.close()
            self._over()
