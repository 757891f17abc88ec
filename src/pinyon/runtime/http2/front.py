"""One port for both: connections of this implementation's clients are served in the event loop, all others by grpcio,
which listens on a port of its own on loopback.

A client is told apart by its first bytes, which are looked at and left where they are
(:mod:`pinyon.runtime.http2.hello`).
"""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable
from contextlib import suppress
from functools import partial

from pinyon.core.address import network_of, parse_address
from pinyon.runtime.http2.hello import ALPN, LOOK_BYTES, Speaker, who_speaks, who_speaks_tls
from pinyon.runtime.http2.newcomers import Newcomers
from pinyon.runtime.http2.relay import relay
from pinyon.runtime.http2.server import Http2Server, ServerProtocol

__all__ = ["Front"]

BACKLOG = 2048
ACCEPTED_AT_ONCE = 64
"""Then others have their turn."""
LEAST_S = 0.01
"""asyncio takes no less for a handshake."""
PAUSE_S = 0.5
"""After a failure to accept, such as for want of descriptors: what is there would fail again."""

SHARES = 4
"""One address has one of them for those that are not known yet."""

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

_log = logging.getLogger("pinyon.http2")


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
        that has not said within ``hello_s`` who it is, with TLS all of its handshake, is closed. When there are
        ``connections_max``, the oldest that is not known makes room: that is one without a certificate and a call, and
        for ``hello_s`` one that is grpcio's, which closes by then who has not shown it who it is."""
        self._server = server
        self._behind = parse_address(behind)
        self._connections_max = connections_max
        self._hello_s = hello_s
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._listening: list[socket.socket] = []
        self._waiting: dict[socket.socket, asyncio.TimerHandle] = {}
        """Who has not said yet who it is, and what ends that."""
        self._handshakes: dict[asyncio.Task[None], ServerProtocol] = {}
        self._relays: set[asyncio.Task[None]] = set()
        self._newcomers = Newcomers(max(1, connections_max // SHARES))
        self.connections = 0

    def open(self, listen: str) -> int:
        """Listen; the port. Raises :class:`OSError`."""
        host, port = parse_address(listen)
        missing: OSError | None = None
        try:
            for family, name in _places(host, port):
                port = port or (self._listening[0].getsockname()[1] if self._listening else 0)
                try:
                    bound = socket.create_server(
                        (name, port),
                        family=family,
                        backlog=BACKLOG,
                        dualstack_ipv6=name == "::" and socket.has_dualstack_ipv6(),
                    )
                except OSError as error:
                    if error.errno not in _NOT_HERE:
                        raise
                    missing = error  # a name may have addresses that this machine has not
                    continue
                bound.setblocking(False)
                self._listening.append(bound)
                if name == "::":  # IPv4, too
                    break
            if missing is not None and not self._listening:
                raise missing
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
        for task, protocol in list(self._handshakes.items()):
            _end(task, protocol)
        for client in list(self._waiting):
            self._drop(client)

    async def close(self) -> None:
        self.stop()
        tasks = [*self._handshakes, *self._relays]
        for task in tasks:
            task.cancel()
        if tasks:
            await asyncio.wait(tasks)

    # -- who comes

    def _accept(self, bound: socket.socket) -> None:
        for _ in range(ACCEPTED_AT_ONCE):
            try:
                client, address = bound.accept()
            except (BlockingIOError, InterruptedError):
                return
            except ConnectionError:
                continue
            except OSError as error:
                if error.errno in (errno.EMFILE, errno.ENFILE) and self._newcomers.make_room():
                    return  # there is a descriptor soon
                _log.warning("cannot accept connections: %s", error.strerror or error)
                self._loop.remove_reader(bound)
                self._loop.call_later(PAUSE_S, self._accept_again, bound)
                return
            if self.connections >= self._connections_max and not self._newcomers.make_room():
                client.close()
                continue
            client.setblocking(False)
            self.connections += 1
            self._waiting[client] = self._loop.call_later(self._hello_s, self._drop, client)
            self._newcomers.enter(client, network_of(address[0]), partial(self._drop, client))
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
            self._over(client)

    def _over(self, client: socket.socket) -> None:
        self._newcomers.leave(client)
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
        if not isinstance(speaker, Speaker):
            if len(data) < client.getsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT):
                self._drop(client)  # it can be read, and not for what was waited for: nothing more comes
                return
            client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, speaker)
            self._loop.add_reader(client, self._look, client)
            return
        client.setsockopt(socket.SOL_SOCKET, socket.SO_RCVLOWAT, 1)
        timer = self._waiting.pop(client)
        left_s = max(LEAST_S, timer.when() - self._loop.time())
        timer.cancel()
        # What gives the place back is told of the task's end: one that is cancelled before its first step runs nothing.
        if speaker is Speaker.OURS:
            met = partial(self._newcomers.leave, client)
            protocol = self._server.protocol(partial(self._over, client), met)
            task = self._loop.create_task(self._serve(client, protocol, left_s))
            self._newcomers.change(client, partial(_end, task, protocol))
            self._handshakes[task] = protocol
            task.add_done_callback(lambda task: self._served(task, client, protocol))
        else:
            task = self._loop.create_task(relay(client, self._behind))
            self._relays.add(task)
            self._newcomers.change(client, task.cancel)
            known = self._loop.call_later(left_s, self._newcomers.leave, client)
            task.add_done_callback(lambda task: self._relayed(task, client, known))

    async def _serve(self, client: socket.socket, protocol: ServerProtocol, left_s: float) -> None:
        """Until it is the protocol's; a handshake has ``left_s``."""
        with suppress(OSError):  # no TLS that fits, none in time, or the client left
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            if self._tls is None:
                await self._loop.connect_accepted_socket(lambda: protocol, client)
            else:
                await self._loop.connect_accepted_socket(
                    lambda: protocol, client, ssl=self._tls(), ssl_handshake_timeout=left_s
                )

    def _served(self, task: asyncio.Task[None], client: socket.socket, protocol: ServerProtocol) -> None:
        self._handshakes.pop(task, None)
        if not protocol.made:  # a handshake that fails never tells it
            client.close()
            self._over(client)

    def _relayed(self, task: asyncio.Task[None], client: socket.socket, known: asyncio.TimerHandle) -> None:
        self._relays.discard(task)
        known.cancel()
        client.close()
        self._over(client)


def _end(task: asyncio.Task[None], protocol: ServerProtocol) -> None:
    if protocol.made:  # uvloop would not tell it of its end if the task were cancelled
        protocol.abort("its place is needed")
    else:
        task.cancel()


def _places(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Where to listen, as grpcio has it: any address of IPv4 is any address. Raises :class:`OSError`."""
    if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
        return [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")][: 2 if host == "0.0.0.0" else 1]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))
