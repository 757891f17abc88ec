"""The listening sockets of a server, with bounds on the number of connections and on who may hold them."""

from __future__ import annotations

import asyncio
import errno
import logging
import socket
import ssl
from collections.abc import Callable, Hashable
from contextlib import suppress
from functools import partial

from pinyon.core.address import network_of, parse_address
from pinyon.runtime.http2.protocol import Http2Protocol

CONNECTIONS_MAX = 4096
"""The limit of connections per listening address; the oldest connection whose peer is not known makes room."""
HANDSHAKE_S = 10.0
"""Seconds for a connection's TLS handshake; with grpcio, also for that of HTTP/2."""
BACKLOG = 2048
ACCEPTED_AT_ONCE = 64
"""The connections accepted in one turn of the loop; then other tasks run."""
PAUSE_S = 0.5
"""Seconds of pause after a failure to accept, such as a lack of descriptors, which would only fail again."""

SHARES = 4
"""The number of shares of all connections. Unknown peers of one address, or of its IPv6 /64, may have one share."""

MakeProtocol = Callable[[Callable[[], None], Callable[[], None]], Http2Protocol]
"""A function that makes the protocol of a new connection.

The protocol calls the first argument when the connection is over, and the second once its peer is known."""

_NOT_HERE = (errno.EADDRNOTAVAIL, errno.EAFNOSUPPORT)

_log = logging.getLogger("pinyon.http2")


class Listener:
    """A listener: ``bind`` → ``start`` → ``stop``, which ends handshakes too → ``close``, which awaits those."""

    def __init__(self, make: MakeProtocol, tls: Callable[[], ssl.SSLContext] | None = None) -> None:
        """Takes ``tls``, which returns the context for a new connection."""
        self._make = make
        self._tls = tls
        self._loop = asyncio.get_running_loop()
        self._bound: list[socket.socket] = []
        self._handshakes: dict[asyncio.Task[None], Http2Protocol] = {}
        self._newcomers = Newcomers(max(1, CONNECTIONS_MAX // SHARES))
        self.connections = 0

    def bind(self, listen: str) -> int:
        """Binds the address and returns the port. Raises :class:`OSError`."""
        host, port = parse_address(listen)
        missing: OSError | None = None
        try:
            for family, name in _places(host, port):
                port = port or (self._bound[0].getsockname()[1] if self._bound else 0)
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
                    missing = error  # a name may have addresses that this machine does not have
                    continue
                bound.setblocking(False)
                self._bound.append(bound)
                if name == "::":  # includes IPv4
                    break
            if missing is not None and not self._bound:
                raise missing
        except OSError:
            self.stop()
            raise
        return int(self._bound[0].getsockname()[1])

    def start(self) -> None:
        """Begins to accept connections."""
        for bound in self._bound:
            self._loop.add_reader(bound, self._accept, bound)

    def stop(self) -> None:
        for bound in self._bound:
            self._loop.remove_reader(bound)
            bound.close()
        self._bound.clear()
        for task, protocol in list(self._handshakes.items()):
            _end(task, protocol)

    async def close(self) -> None:
        self.stop()
        if self._handshakes:
            await asyncio.wait(list(self._handshakes))

    # -- new connections

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
                    return  # a descriptor will be free soon
                _log.warning("cannot accept connections: %s", error.strerror or error)
                self._loop.remove_reader(bound)
                self._loop.call_later(PAUSE_S, self._accept_again, bound)
                return
            if self.connections >= CONNECTIONS_MAX and not self._newcomers.make_room():
                client.close()
                continue
            self._enter(client, network_of(address[0]))

    def _accept_again(self, bound: socket.socket) -> None:
        if bound in self._bound:
            self._loop.add_reader(bound, self._accept, bound)

    def _enter(self, client: socket.socket, network: str) -> None:
        client.setblocking(False)
        self.connections += 1
        protocol = self._make(partial(self._over, client), partial(self._newcomers.leave, client))
        task = self._loop.create_task(self._connect(client, protocol))
        self._handshakes[task] = protocol
        # The place is given back at the task's end, as a task that is cancelled before its first step runs no code.
        task.add_done_callback(lambda task: self._connected(task, client, protocol))
        self._newcomers.enter(client, network, partial(_end, task, protocol))

    async def _connect(self, client: socket.socket, protocol: Http2Protocol) -> None:
        """Does the handshake, and returns when the protocol has the connection, or never will."""
        with suppress(OSError):  # no common TLS, a late handshake, or the client left
            client.setsockopt(socket.IPPROTO_TCP, socket.TCP_NODELAY, 1)
            tls, limit_s = (None, None) if self._tls is None else (self._tls(), HANDSHAKE_S)
            await self._loop.connect_accepted_socket(lambda: protocol, client, ssl=tls, ssl_handshake_timeout=limit_s)

    def _connected(self, task: asyncio.Task[None], client: socket.socket, protocol: Http2Protocol) -> None:
        self._handshakes.pop(task, None)
        if not protocol.made:  # the protocol does not hear of a failed handshake
            client.close()
            self._over(client)

    def _over(self, client: socket.socket) -> None:
        self._newcomers.leave(client)
        self.connections -= 1


def _end(task: asyncio.Task[None], protocol: Http2Protocol) -> None:
    if protocol.made:  # uvloop would not tell the protocol of its end if the task were cancelled
        protocol.abort("its place is needed")
    else:
        task.cancel()


def _places(host: str, port: int) -> list[tuple[socket.AddressFamily, str]]:
    """Returns where to listen. As in grpcio, any IPv4 address means any address at all. Raises :class:`OSError`."""
    if host in ("0.0.0.0", "::") and socket.has_dualstack_ipv6():
        return [(socket.AF_INET6, "::"), (socket.AF_INET, "0.0.0.0")][: 2 if host == "0.0.0.0" else 1]
    found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM, flags=socket.AI_PASSIVE)
    return list(dict.fromkeys((family, str(address[0])) for family, _, _, _, address in found))


class Newcomers:
    """The connections of unknown peers: each address has a share of them, and the oldest make room.

    Those of known peers are not in it, and are never displaced. An address is what the caller counts as one peer, such
    as an IPv6 /64. No I/O."""

    def __init__(self, share: int) -> None:
        """Takes the ``share``: how many of these connections one address may have."""
        self._share = share
        self._addresses: dict[Hashable, str] = {}
        self._ends: dict[str, dict[Hashable, Callable[[], object]]] = {}
        """The functions that end connections, by address and connection, the oldest first."""

    def enter(self, connection: Hashable, address: str, end: Callable[[], object]) -> None:
        """Adds a connection; if its address has too many, the oldest of them is ended."""
        self._addresses[connection] = address
        crowd = self._ends.setdefault(address, {})
        crowd[connection] = end
        if len(crowd) > self._share:
            self._end_oldest(crowd)

    def leave(self, connection: Hashable) -> None:
        """Takes out a connection whose peer is known, or that is over. Calling it again is fine."""
        address = self._addresses.pop(connection, None)
        if address is not None:
            crowd = self._ends[address]
            del crowd[connection]
            if not crowd:
                del self._ends[address]

    def make_room(self) -> bool:
        """Ends the oldest connection of the address that has most; returns False if there is none. O(addresses)."""
        if not self._ends:
            return False
        self._end_oldest(max(self._ends.values(), key=len))
        return True

    def _end_oldest(self, crowd: dict[Hashable, Callable[[], object]]) -> None:
        oldest, end = next(iter(crowd.items()))
        self.leave(oldest)
        end()
