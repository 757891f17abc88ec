"""One accepted link: its set-up, its thread, and the service that it is handed to."""

from __future__ import annotations

import logging
import secrets
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from pinyon.core.clock import Clock
from pinyon.transfer.links import handshake
from pinyon.transfer.links.identity import Identity
from pinyon.transfer.links.stream import DeadlineReached, Stalled, Stream
from pinyon.transfer.links.tls import TlsStream
from pinyon.transfer.types.errors import WireError
from pinyon.transfer.types.limits import TransferLimits

__all__ = ["Door", "Inbound", "LinkService"]

_log = logging.getLogger(__name__)
_TLS_RECORD = b"\x16\x03"
"""How a TLS handshake begins (RFC 8446, section 5.1: type handshake, version 3.x)."""


class LinkService(Protocol):
    """Serves the links of one :class:`pinyon.transfer.links.handshake.Service`."""

    def serve(self, inbound: Inbound) -> None:
        """Run in the link's thread until it is idle too long, closed or broken; ``inbound`` is closed afterwards.

        May raise WireError (counted and logged), OSError, Stalled, DeadlineReached. Between two requests the link must
        be ``rest``-ed, and ``work`` asked before the next: a resting link may be evicted.
        """
        ...


class Door(Protocol):
    """What an accepted link needs of the one who let it in."""

    identity: Identity
    limits: TransferLimits
    services: Mapping[int, LinkService]

    def admit(self, inbound: Inbound, hello: handshake.Hello) -> handshake.HelloCode:
        """Enter a link whose handshake is through, after the one it replaces has ended."""
        ...

    def take(self, inbound: Inbound) -> bool:
        """From now on the link is not evicted. False: it has been."""
        ...

    def release(self, inbound: Inbound) -> None:
        """From now on the link may be evicted."""
        ...

    def ended(self, inbound: Inbound) -> None:
        """Nothing of the link is left."""
        ...

    def count(self, name: str) -> None:
        """One more protocol error or refused identity (a counter of ``StatsRecorder``)."""
        ...


class Inbound:
    """One accepted link and its thread."""

    def __init__(self, door: Door, sock: socket.socket, clock: Clock = time.monotonic) -> None:
        self._door = door
        self._clock = clock
        self._sock = sock
        self._aborted = False
        self._resting = False
        limits = door.limits
        self.stream = Stream(sock, limits.stall_s, limits.socket_buffer_bytes, limits.spin_s, clock)
        self.identity: tuple[bytes, int] | None = None
        """Client boot id and link id, once the handshake is through."""
        self.thread = threading.Thread(target=self._work, name="pinyon-transfer-in", daemon=True)
        self.on_end: list[Callable[[], None]] = []
        """What the service must undo when the link ends (destroy a queue pair, stop a copy); run in the link's thread
        before anybody who waits for the link's end goes on."""

    def abort(self) -> None:
        """Make the thread end soon; from any thread."""
        self._aborted = True
        self.stream.abort()

    def work(self) -> bool:
        """Before serving a request: from now on the link is in use and not evicted. False: it has been, end."""
        if self._resting:
            if not self._door.take(self):
                return False
            self._resting = False
        return True

    def rest(self) -> None:
        """After serving a request: until the next ``work`` the link may be evicted to make room for another."""
        if not self._resting:
            self._resting = True
            self._door.release(self)

    def receive_bytes(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        self.stream.receive([memoryview(data)], deadline)
        return bytes(data)

    def _work(self) -> None:
        hard = True
        try:
            deadline = self._clock() + self._door.limits.connect_s
            service = self._shake_hands(deadline) if self._secure(deadline) else None
            if service is not None:
                service.serve(self)
            hard = False  # also after a refusal: a reset could overtake the answer
        except WireError as error:
            self._door.count("protocol_errors")
            _log.info("a transfer link broke the protocol: %s", error)
        except (OSError, Stalled, DeadlineReached) as error:
            _log.debug("a transfer link ended: %r", error)
        except Exception:
            _log.exception("a transfer link ended in a defect")
        finally:
            for undo in reversed(self.on_end):
                try:
                    undo()
                except Exception:
                    _log.exception("cleaning up after a transfer link failed")
            self.stream.close(hard=hard)
            self._door.ended(self)

    def _secure(self, deadline: float) -> bool:
        """Wrap a tcp stream in TLS if we have it. False: the peer is not to get in; it was told."""
        tls = self._door.identity.tls
        if self._sock.family == socket.AF_UNIX:
            return True
        wanted = handshake.MAGIC if tls is None else _TLS_RECORD
        first = self.stream.peek(len(handshake.MAGIC), deadline)
        if not first.startswith(wanted):
            if first.startswith((handshake.MAGIC, _TLS_RECORD)):
                # Plain bytes either way: a plain initiator reads a refusal, a TLS one fails at its first record.
                self._refuse(deadline)
                return False
            if not first:
                raise ConnectionResetError("the peer closed the connection")
            raise WireError("not a pinyon transfer connection")
        if tls is not None:
            limits = self._door.limits
            secured = TlsStream(self._sock, tls.server, limits.stall_s, limits.socket_buffer_bytes, self._clock)
            self.stream = secured
            if self._aborted:  # before the line above, when it hit the socket that is no more
                return False
            try:
                secured.shake_hands(deadline)
            except ssl.SSLError:
                self._door.count("auth_failures")
                raise
            if not secured.peer_has(tls.peer_name):
                self._refuse(deadline)
                return False
        return True

    def _refuse(self, deadline: float) -> None:
        """Answer the hello that is to come with a no: this peer has no business here."""
        self._door.count("auth_failures")
        self.receive_bytes(handshake.HELLO_BYTES, deadline)
        boot = bytes(len(self._door.identity.boot_id))
        refusal = handshake.HelloCode.AUTH, boot, bytes(handshake.NONCE_BYTES), b"", None
        self.stream.send([handshake.pack_hello_reply(*refusal)], deadline)

    def _shake_hands(self, deadline: float) -> LinkService | None:
        door = self._door
        secret, boot_id = door.identity.secret, door.identity.boot_id
        hello_bytes = self.receive_bytes(handshake.HELLO_BYTES, deadline)
        version, hello = handshake.parse_hello(hello_bytes)
        service = door.services.get(hello.service)
        code = handshake.HelloCode.OK
        if version != handshake.VERSION:
            code = handshake.HelloCode.VERSION
        elif hello.authenticated is not (secret is not None):
            code = handshake.HelloCode.AUTH
        elif hello.expected_boot != boot_id:
            code = handshake.HelloCode.STALE
        elif secret is None:
            code = door.admit(self, hello) if service is not None else handshake.HelloCode.NO_SERVICE
        ok = code is handshake.HelloCode.OK
        reply = handshake.pack_hello_reply(
            code,
            boot_id if ok else bytes(len(boot_id)),
            secrets.token_bytes(handshake.NONCE_BYTES),
            hello_bytes,
            secret if ok else None,
        )
        if code is handshake.HelloCode.AUTH:
            door.count("auth_failures")
        self.stream.send([reply], deadline)
        if not ok or secret is None:
            return service if ok else None
        proof = self.receive_bytes(handshake.MAC_BYTES, deadline)
        if not handshake.verify_client(secret, hello_bytes, reply, proof):
            code = handshake.HelloCode.AUTH
            door.count("auth_failures")
        elif service is None:
            code = handshake.HelloCode.NO_SERVICE
        else:
            code = door.admit(self, hello)
        self.stream.send([handshake.pack_accept(code)], deadline)
        return service if code is handshake.HelloCode.OK else None
