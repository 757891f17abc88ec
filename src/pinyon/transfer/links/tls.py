"""TLS for tcp links: mutual, 1.3, one cluster CA. A certificate says which cluster and which role, not which host.

Set-up (:mod:`pinyon.transfer.links.handshake`) and frames run inside it unchanged. Payload no longer goes straight
between the socket and registered memory: OpenSSL moves it in records of at most 16 KiB, which costs speed."""

from __future__ import annotations

import socket
import ssl
from collections.abc import Sequence
from pathlib import Path

from pinyon.core.clock import Clock
from pinyon.transfer.links.stream import DeadlineReached, Stream
from pinyon.transfer.types.errors import InvalidTransfer
from pinyon.transfer.types.limits import TransferLimits

_JOIN_BYTES = 16 << 10
"""Buffers smaller than this are joined into one record."""
_WRITE_BYTES = 64 << 10
"""Size of one write, which is all or nothing to us: small against what a stalled link moves in a tick."""


class TlsContexts:
    """The contexts that links are made with. After the files have changed, ``renew``: later links use the new ones."""

    def __init__(self, certificate: Path, key: Path, ca: Path, peer_name: str = "") -> None:
        """Takes PEM files: this process's certificate with its key, for both roles, and the cluster's authority.

        Peers must have a certificate of that authority and, if ``peer_name`` is given, of that DNS name. Raises
        InvalidTransfer if a file cannot be read or does not fit."""
        self._files = certificate, key, ca
        self.peer_name = peer_name
        self.renew()

    def renew(self) -> None:
        """Reads the files again. Raises InvalidTransfer as above; the old contexts stay then."""
        certificate, key, ca = self._files
        try:
            server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
            client.check_hostname = False  # the peer's name is compared after the handshake
            server.num_tickets = 0  # links live long, so nothing is resumed
            for context in (server, client):
                context.minimum_version = ssl.TLSVersion.TLSv1_3
                context.verify_mode = ssl.CERT_REQUIRED
                context.load_cert_chain(certificate, key)
                context.load_verify_locations(ca)
        except OSError as error:  # ssl.SSLError too
            raise InvalidTransfer(f"TLS files: {error}", field="tls") from None
        self.server, self.client = server, client


class TlsStream(Stream):
    """A stream with the same waits and bounds over an ``SSLSocket``, whose timeouts take the place of the kernel's."""

    sock: ssl.SSLSocket

    def __init__(self, sock: socket.socket, context: ssl.SSLContext, limits: TransferLimits, clock: Clock) -> None:
        """Takes over ``sock``, which is connected; its side of TLS is the context's. Next comes ``shake_hands``."""
        server_side = context.protocol == ssl.PROTOCOL_TLS_SERVER
        wrapped = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        super().__init__(wrapped, limits, clock, polls=False)  # bytes of a record are not bytes of the payload yet
        self._timeouts = (TimeoutError, BlockingIOError)

    def shake_hands(self, deadline: float) -> None:
        """Runs the handshake. Raises DeadlineReached, OSError (``ssl.SSLError`` for a wrong peer or certificate)."""
        remaining = deadline - self._clock()
        if remaining <= 0:
            raise DeadlineReached
        self.sock.settimeout(remaining)  # for the handshake as a whole
        self.sock.do_handshake()
        self._armed_s = 0.0

    def peer_has(self, name: str) -> bool:
        """Returns whether the peer's certificate has this DNS name, after the handshake; "" is any."""
        names = (self.sock.getpeercert() or {}).get("subjectAltName", ())
        return not name or (isinstance(names, tuple) and ("DNS", name) in names)

    def _set_timeout(self, timeout: float) -> None:
        self.sock.settimeout(timeout)

    def waits_itself(self) -> None:
        """Does nothing: Python does the waits, on a socket whose calls return at once."""

    def receive_now(self, buffer: memoryview) -> int | None:
        self.sock.settimeout(0)
        self._armed_s = 0.0
        try:
            return self.sock.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def send_one(self, buffer: bytes | memoryview, deadline: float) -> None:
        self.send((buffer,), deadline)  # which cuts the buffer into records

    def _send_some(self, rest: Sequence[bytes | memoryview]) -> int:
        first = rest[0]
        if len(rest) == 1 or len(first) >= _JOIN_BYTES:
            return self.sock.send(memoryview(first)[:_WRITE_BYTES])
        # After a timeout the same buffers come again, and so the same record, as OpenSSL demands.
        record = bytearray()
        for buffer in rest:
            record += buffer[: _JOIN_BYTES - len(record)]
            if len(record) == _JOIN_BYTES:
                break
        return self.sock.send(record)

    def _receive_some(self, rest: Sequence[memoryview]) -> int:
        return self.sock.recv_into(rest[0])
