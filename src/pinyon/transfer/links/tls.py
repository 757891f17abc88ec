"""TLS for tcp links: mutual, 1.3, one cluster CA. The certificate says "of this cluster" and what for, not which host.

Set-up (:mod:`pinyon.transfer.links.handshake`) and frames run inside it unchanged. Payload no longer goes straight
between the socket and registered memory: OpenSSL moves it in records of at most 16 KiB, which costs speed.
"""

from __future__ import annotations

import socket
import ssl
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

from pinyon.core.clock import Clock
from pinyon.transfer.links.stream import DeadlineReached, Stream
from pinyon.transfer.types.errors import InvalidTransfer

_JOIN_BYTES = 16 << 10
"""Small buffers are joined into one record."""
_WRITE_BYTES = 64 << 10
"""One write: all or nothing as far as we see, so it is small against what a stalled link moves in a tick."""


@dataclass(frozen=True, slots=True)
class TlsFiles:
    """PEM files of this process."""

    certificate: Path
    """Its certificate, with intermediate ones if any; usable as server and as client."""
    key: Path
    ca: Path
    """Who signs the certificates of the cluster; peers with another signature are refused."""
    peer_name: str = ""
    """A DNS name that peers' certificates must have; empty: any certificate of the cluster will do."""


class TlsContexts:
    """What links are made with. ``renew`` after the files have changed: links made later use the new ones."""

    def __init__(self, files: TlsFiles) -> None:
        """Raises InvalidTransfer: a file cannot be read or does not fit."""
        self._files = files
        self.peer_name = files.peer_name
        self.server, self.client = _contexts(files)

    def renew(self) -> None:
        """Raises InvalidTransfer: as above; the old ones stay."""
        self.server, self.client = _contexts(self._files)


def _contexts(files: TlsFiles) -> tuple[ssl.SSLContext, ssl.SSLContext]:
    """``(server, client)``. Both demand a certificate of the peer; the name is compared once hands are shaken."""
    try:
        server, client = ssl.SSLContext(ssl.PROTOCOL_TLS_SERVER), ssl.SSLContext(ssl.PROTOCOL_TLS_CLIENT)
        client.check_hostname = False
        server.num_tickets = 0  # links live long: nothing is resumed
        for context in (server, client):
            context.minimum_version = ssl.TLSVersion.TLSv1_3
            context.verify_mode = ssl.CERT_REQUIRED
            context.load_cert_chain(files.certificate, files.key)
            context.load_verify_locations(files.ca)
    except OSError as error:  # ssl.SSLError too
        raise InvalidTransfer(f"TLS files: {error}", field="tls") from None
    return server, client


class TlsStream(Stream):
    """The same waits and bounds over an ``SSLSocket``, whose timeouts take the place of the kernel's."""

    _sock: ssl.SSLSocket

    def __init__(
        self,
        sock: socket.socket,
        context: ssl.SSLContext,
        stall_s: float,
        buffer_bytes: int,
        clock: Clock = time.monotonic,
    ) -> None:
        """Takes over ``sock``, connected; its side of TLS is the context's. ``shake_hands`` comes next."""
        server_side = context.protocol == ssl.PROTOCOL_TLS_SERVER
        wrapped = context.wrap_socket(sock, server_side=server_side, do_handshake_on_connect=False)
        # No polling: a record's bytes are no bytes of ours yet.
        super().__init__(wrapped, stall_s, buffer_bytes, clock=clock)
        self._timeouts = (TimeoutError, BlockingIOError)

    def shake_hands(self, deadline: float) -> None:
        """Raises DeadlineReached, OSError (``ssl.SSLError`` when the peer or its certificate is not right)."""
        remaining = deadline - self._clock()
        if remaining <= 0:
            raise DeadlineReached
        self._sock.settimeout(remaining)  # of the handshake as a whole
        self._sock.do_handshake()
        self._armed_s = 0.0

    def peer_has(self, name: str) -> bool:
        """Whether the peer's certificate has this DNS name, once hands are shaken; "" is any."""
        names = (self._sock.getpeercert() or {}).get("subjectAltName", ())
        return not name or (isinstance(names, tuple) and ("DNS", name) in names)

    def _set_timeout(self, timeout: float) -> None:
        self._sock.settimeout(timeout)

    def waits_itself(self) -> None:
        """Its waits are Python's, of a socket whose calls return at once."""

    def receive_now(self, buffer: memoryview) -> int | None:
        self._sock.settimeout(0)
        self._armed_s = 0.0
        try:
            return self._sock.recv_into(buffer)
        except (ssl.SSLWantReadError, ssl.SSLWantWriteError):
            return None

    def send_one(self, buffer: bytes | memoryview, deadline: float) -> None:
        self.send((buffer,), deadline)  # cut into records

    def _send_some(self, rest: Sequence[bytes | memoryview]) -> int:
        first = rest[0]
        if len(rest) == 1 or len(first) >= _JOIN_BYTES:
            return self._sock.send(memoryview(first)[:_WRITE_BYTES])
        # After a timeout the same buffers come again, and so the same record, as OpenSSL demands.
        record = bytearray()
        for buffer in rest:
            record += buffer[: _JOIN_BYTES - len(record)]
            if len(record) == _JOIN_BYTES:
                break
        return self._sock.send(record)

    def _receive_some(self, rest: Sequence[memoryview]) -> int:
        return self._sock.recv_into(rest[0])
