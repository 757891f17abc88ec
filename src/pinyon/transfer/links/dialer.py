"""The initiator's side of a link's set-up: connect, authenticate, name the service."""

from __future__ import annotations

import contextlib
import itertools
import secrets
import socket
import ssl
from dataclasses import dataclass

from pinyon.core.clock import Clock
from pinyon.transfer.chains.chain import BAD_BYTES, LATE, NO_CONNECTION, STALLED, ChainOutcome
from pinyon.transfer.links import handshake
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.stream import DeadlineReached, Stalled, Stream
from pinyon.transfer.links.tls import TlsStream
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.request import Reason, TransferStatus

_link_ids = itertools.count(1)

LinkAddress = tuple[str, int] | str
"""IP address (or name) and port, or the name of an abstract Unix socket (``@...``)."""


class DialRefused(Exception):
    """The peer refused the set-up, or could not prove that it knows the secret."""

    def __init__(self, reason: Reason) -> None:
        super().__init__(reason.name)
        self.reason = reason


_REASONS = {
    handshake.HelloCode.VERSION: Reason.PROTOCOL,
    handshake.HelloCode.STALE: Reason.STALE_SEGMENT,
    handshake.HelloCode.AUTH: Reason.UNAUTHENTICATED,
    handshake.HelloCode.BUSY: Reason.BUSY,
    handshake.HelloCode.NO_SERVICE: Reason.CONNECT_FAILED,
}

_CLOSED_BY_PEER = (ssl.SSLEOFError, ssl.SSLZeroReturnError)

_FINAL = (Reason.STALE_SEGMENT, Reason.UNAUTHENTICATED)
"""Answers that the same request would get again, by any path."""


def dial_failure(error: BaseException, deadline: float, now_s: float) -> ChainOutcome | None:
    """Returns the outcome of a chain with this deadline for which dialling failed; None if the error is a defect."""
    if isinstance(error, DialRefused):
        return ChainOutcome(TransferStatus.REFUSED if error.reason in _FINAL else TransferStatus.FAILED, error.reason)
    if isinstance(error, (Stalled, DeadlineReached, TimeoutError)):
        return LATE if now_s >= deadline else STALLED
    if isinstance(error, WireError):
        return BAD_BYTES
    return NO_CONNECTION if isinstance(error, OSError) else None


@dataclass(slots=True, eq=False)
class Link:
    """An authenticated stream to a peer's service, owned and closed by its dialler."""

    stream: Stream
    id: int
    """An id that is unique in this process life, for a later link's ``replaces``."""
    marks: handshake.Marks = handshake.NO_MARKS


def dial(
    context: EngineContext,
    address: LinkAddress,
    expected_boot: bytes,
    service: handshake.Service,
    deadline: float,
    *,
    source: str = "",
    interface: str = "",
    replaces: int = 0,
) -> Link:
    """Connects and shakes hands before ``deadline`` (the clock's seconds) or the connect limit, whichever is first.

    The peer refuses unless its boot id is ``expected_boot``. The connection comes from the local IP address ``source``,
    which chooses the local NIC; "" leaves it to the routing table. It is bound to the network ``interface`` where that
    is possible, for hosts with several NICs on one network. Before the peer answers it must have ended our link with
    the id ``replaces``; 0 names none.

    Raises DialRefused, WireError, OSError (``TimeoutError`` when nobody answers), Stalled or DeadlineReached."""
    limits, clock = context.limits, context.clock
    now = clock()
    limit = min(deadline, now + limits.connect_s)
    if limit <= now:
        raise DeadlineReached
    sock = (
        _connect_tcp(address, limit, source, interface, clock)
        if isinstance(address, tuple)
        else _connect_unix(address, limit - now)
    )
    stream: Stream | None = None
    try:
        if (tls := context.tls) is not None and isinstance(address, tuple):
            stream = TlsStream(sock, tls.client, limits, clock)
            stream.shake_hands(limit)
            if not stream.peer_has(tls.peer_name):
                raise DialRefused(Reason.UNAUTHENTICATED)
        else:
            stream = Stream(sock, limits, clock)
        link = Link(stream, next(_link_ids))
        _shake_hands(context, link, expected_boot, service, limit, replaces)
    except BaseException as error:
        if stream is not None:
            stream.close(hard=True)
        else:
            sock.close()
        if isinstance(error, ssl.SSLError) and not isinstance(error, _CLOSED_BY_PEER):
            raise DialRefused(Reason.UNAUTHENTICATED) from error
        raise
    return link


def _connect_tcp(address: tuple[str, int], deadline: float, source: str, interface: str, clock: Clock) -> socket.socket:
    """Connects like ``socket.create_connection``, but bound to the interface first; tries each address of the name."""
    last: OSError | None = None
    for family, kind, proto, _, where in socket.getaddrinfo(*address, type=socket.SOCK_STREAM):
        sock = socket.socket(family, kind, proto)
        try:
            sock.settimeout(max(deadline - clock(), 0.001))
            if interface and hasattr(socket, "SO_BINDTODEVICE"):
                with contextlib.suppress(OSError):  # no such interface, or not allowed: the source address must do
                    sock.setsockopt(socket.SOL_SOCKET, socket.SO_BINDTODEVICE, interface.encode())
            if source:
                sock.bind((source, 0))
            sock.connect(where)
            return sock
        except OSError as error:
            last = error
            sock.close()
        except BaseException:
            sock.close()
            raise
    try:
        raise last or OSError(f"no address for {address[0]}")
    finally:
        del last  # else the error and this frame hold each other, and both hold the chain's memory


def _connect_unix(name: str, timeout_s: float) -> socket.socket:
    sock = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
    try:
        sock.settimeout(timeout_s)
        sock.connect("\0" + name[1:])
    except BaseException:
        sock.close()
        raise
    return sock


def _shake_hands(
    context: EngineContext, link: Link, expected_boot: bytes, service: handshake.Service, limit: float, replaces: int
) -> None:
    secret = context.secret
    nonce = secrets.token_bytes(handshake.NONCE_BYTES)
    hello = handshake.pack_hello(
        handshake.Hello(link.id, replaces, context.boot_id, expected_boot, nonce, secret is not None, service)
    )
    link.stream.send([hello], limit)
    reply_bytes = link.stream.receive_bytes(handshake.HELLO_REPLY_BYTES, limit)
    code, server_boot = handshake.parse_hello_reply(reply_bytes)
    if code is not handshake.HelloCode.OK:
        raise DialRefused(_REASONS[code])
    if server_boot != expected_boot:
        raise DialRefused(Reason.STALE_SEGMENT)
    link.marks = handshake.marks(hello, reply_bytes)
    if secret is None:
        return
    if not handshake.verify_server(secret, hello, reply_bytes):
        raise DialRefused(Reason.UNAUTHENTICATED)
    link.stream.send([handshake.client_mac(secret, hello, reply_bytes)], limit)
    code = handshake.parse_accept(link.stream.receive_bytes(handshake.ACCEPT_BYTES, limit))
    if code is not handshake.HelloCode.OK:
        raise DialRefused(_REASONS[code])
