"""The front door: listens, authenticates, and hands each accepted link to the service it asks for."""

from __future__ import annotations

import contextlib
import logging
import os
import secrets
import selectors
import socket
import ssl
import threading
import time
from collections.abc import Callable, Mapping
from typing import Protocol

from pinyon.transfer import handshake
from pinyon.transfer.endpoint_pool import EndpointPool
from pinyon.transfer.errors import WireError
from pinyon.transfer.limits import TransferLimits
from pinyon.transfer.transports.base import Meter
from pinyon.transfer.transports.identity import Identity
from pinyon.transfer.transports.stream import DeadlineReached, Stalled, Stream
from pinyon.transfer.transports.tls import TlsStream

__all__ = ["Acceptor", "Inbound", "LinkService"]

_log = logging.getLogger(__name__)
_TICK_S = 1.0
_ROOM_S = 0.05
"""How long one more link waits for another to come to rest (it polls for a moment after each request) before BUSY."""
_TLS_RECORD = b"\x16\x03"
"""How a TLS handshake begins (RFC 8446, section 5.1: type handshake, version 3.x)."""


class LinkService(Protocol):
    """Serves the links of one :class:`pinyon.transfer.handshake.Service`."""

    def serve(self, inbound: Inbound) -> None:
        """Run in the link's thread until it is idle too long, closed or broken; ``inbound`` is closed afterwards.

        May raise WireError (counted and logged), OSError, Stalled, DeadlineReached. Between two requests the link must
        be ``rest``-ed, and ``work`` asked before the next: a resting link may be evicted.
        """
        ...


class Inbound:
    """One accepted link and its thread."""

    def __init__(self, acceptor: Acceptor, sock: socket.socket) -> None:
        self._acceptor = acceptor
        self._sock = sock
        self._aborted = False
        self._resting = False
        limits = acceptor.limits
        self.stream = Stream(sock, limits.stall_s, limits.socket_buffer_bytes, limits.spin_s)
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
            if not self._acceptor.take(self):
                return False
            self._resting = False
        return True

    def rest(self) -> None:
        """After serving a request: until the next ``work`` the link may be evicted to make room for another."""
        if not self._resting:
            self._resting = True
            self._acceptor.release(self)

    def receive_bytes(self, count: int, deadline: float) -> bytes:
        data = bytearray(count)
        self.stream.receive([memoryview(data)], deadline)
        return bytes(data)

    def _work(self) -> None:
        hard = True
        try:
            deadline = time.monotonic() + self._acceptor.limits.connect_s
            service = self._shake_hands(deadline) if self._secure(deadline) else None
            if service is not None:
                service.serve(self)
            hard = False  # also after a refusal: a reset could overtake the answer
        except WireError as error:
            self._acceptor.count("protocol_errors")
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
            self._acceptor.ended(self)

    def _secure(self, deadline: float) -> bool:
        """Wrap a tcp stream in TLS if we have it. False: the peer does not, or has it and we do not; it was told."""
        context = self._acceptor.identity.server_tls
        if self._sock.family == socket.AF_UNIX:
            return True
        wanted = handshake.MAGIC if context is None else _TLS_RECORD
        first = self.stream.peek(len(handshake.MAGIC), deadline)
        if not first.startswith(wanted):
            if first.startswith((handshake.MAGIC, _TLS_RECORD)):
                # Plain bytes either way: a plain initiator reads a refusal, a TLS one fails at its first record.
                self._acceptor.count("auth_failures")
                self.receive_bytes(handshake.HELLO_BYTES, deadline)
                boot = bytes(len(self._acceptor.identity.boot_id))
                refusal = handshake.HelloCode.AUTH, boot, bytes(handshake.NONCE_BYTES), b"", None
                self.stream.send([handshake.pack_hello_reply(*refusal)], deadline)
                return False
            if not first:
                raise ConnectionResetError("the peer closed the connection")
            raise WireError("not a pinyon transfer connection")
        if context is not None:
            limits = self._acceptor.limits
            secured = TlsStream(self._sock, context, limits.stall_s, limits.socket_buffer_bytes)
            self.stream = secured
            if self._aborted:  # before the line above, when it hit the socket that is no more
                return False
            try:
                secured.shake_hands(deadline)
            except ssl.SSLError:
                self._acceptor.count("auth_failures")
                raise
        return True

    def _shake_hands(self, deadline: float) -> LinkService | None:
        acceptor = self._acceptor
        secret, boot_id = acceptor.identity.secret, acceptor.identity.boot_id
        hello_bytes = self.receive_bytes(handshake.HELLO_BYTES, deadline)
        version, hello = handshake.parse_hello(hello_bytes)
        service = acceptor.services.get(hello.service)
        code = handshake.HelloCode.OK
        if version != handshake.VERSION:
            code = handshake.HelloCode.VERSION
        elif hello.authenticated is not (secret is not None):
            code = handshake.HelloCode.AUTH
        elif hello.expected_boot != boot_id:
            code = handshake.HelloCode.STALE
        elif secret is None:
            code = acceptor.admit(self, hello) if service is not None else handshake.HelloCode.NO_SERVICE
        ok = code is handshake.HelloCode.OK
        reply = handshake.pack_hello_reply(
            code,
            boot_id if ok else bytes(len(boot_id)),
            secrets.token_bytes(handshake.NONCE_BYTES),
            hello_bytes,
            secret if ok else None,
        )
        if code is handshake.HelloCode.AUTH:
            acceptor.count("auth_failures")
        self.stream.send([reply], deadline)
        if not ok or secret is None:
            return service if ok else None
        proof = self.receive_bytes(handshake.MAC_BYTES, deadline)
        if not handshake.verify_client(secret, hello_bytes, reply, proof):
            code = handshake.HelloCode.AUTH
            acceptor.count("auth_failures")
        elif service is None:
            code = handshake.HelloCode.NO_SERVICE
        else:
            code = acceptor.admit(self, hello)
        self.stream.send([handshake.pack_accept(code)], deadline)
        return service if code is handshake.HelloCode.OK else None


class Acceptor:
    """Accepts up to ``max_inbound`` links on all addresses of the engine, and can cut off a peer.

    One more link evicts a resting one, chosen by SIEVE; when all are in use it is answered BUSY.
    """

    def __init__(
        self, identity: Identity, limits: TransferLimits, meter: Meter, services: Mapping[int, LinkService]
    ) -> None:
        self.identity = identity
        self.limits = limits
        self.services = services
        self._meter = meter
        self._lock = threading.Lock()
        self._rested = threading.Condition(self._lock)
        self._waiting = 0
        """Listeners that wait for room."""
        self._inbound: set[Inbound] = set()
        """With those that were evicted and whose threads have not ended yet."""
        self._pool: EndpointPool[Inbound, Inbound] = EndpointPool(limits.max_inbound, 1)
        self._by_identity: dict[tuple[bytes, int], Inbound] = {}
        self._closing = threading.Event()
        self._wake = -1  # an eventfd, from the first listener to the close
        self._listeners: list[tuple[socket.socket, threading.Thread]] = []

    def listen(self, host: str, port: int) -> int:
        """Bind a tcp address and start accepting; the port that was bound.

        Raises:
            OSError: the address cannot be had.
        """
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        self._start_accepting(listener)
        return int(listener.getsockname()[1])

    def listen_unix(self, name: str) -> None:
        """Bind an abstract Unix socket (``@...``: gone with the process, nothing to remove) and start accepting.

        Raises:
            OSError: the name cannot be had.
        """
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + name[1:])
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
        self._start_accepting(listener)

    def _start_accepting(self, listener: socket.socket) -> None:
        listener.setblocking(False)
        if self._wake < 0:
            self._wake = os.eventfd(0, os.EFD_CLOEXEC | os.EFD_NONBLOCK)
        thread = threading.Thread(target=self._accept, args=(listener,), name="pinyon-transfer-accept", daemon=True)
        self._listeners.append((listener, thread))
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        with selectors.DefaultSelector() as selector:
            selector.register(listener, selectors.EVENT_READ)
            selector.register(self._wake, selectors.EVENT_READ)
            while not self._closing.is_set():
                selector.select(_TICK_S)
                try:
                    sock, _ = listener.accept()
                except BlockingIOError:
                    continue
                except OSError as error:  # out of file descriptors, or a peer that left the queue
                    if not self._closing.wait(0.05):
                        _log.warning("cannot accept a transfer link: %s", error)
                    continue
                self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        evicted: list[Inbound] | None = None
        inbound = None
        try:
            inbound = Inbound(self, sock)
            with self._lock:
                evicted = self._make_room(inbound)
                if evicted is not None:
                    self._pool.add(inbound, inbound)
                    self._inbound.add(inbound)
                    inbound.thread.start()
        except (OSError, RuntimeError) as error:
            _log.warning("cannot serve a transfer link: %s", error)
            if evicted is not None and inbound is not None:
                self.ended(inbound)
                inbound = None
        for victim in evicted or ():
            victim.abort()
        if evicted is not None and inbound is not None:
            return
        with contextlib.suppress(OSError):
            sock.setblocking(False)
            sock.send(handshake.pack_hello_reply(handshake.HelloCode.BUSY, bytes(16), bytes(16), b"", None))
        sock.close()

    def _make_room(self, inbound: Inbound) -> list[Inbound] | None:
        """Lock held. Those evicted; None: there is no room even after a moment in which a link may come to rest."""
        end = time.monotonic() + _ROOM_S
        while not self._closing.is_set():
            evicted = self._pool.reserve(inbound)
            remaining = end - time.monotonic()
            if evicted is not None or remaining <= 0:
                return evicted
            self._waiting += 1
            self._rested.wait(remaining)
            self._waiting -= 1
        return None

    def admit(self, inbound: Inbound, hello: handshake.Hello) -> handshake.HelloCode:
        """Enter a link whose handshake is through, after the one it replaces has ended."""
        if hello.replaces:
            with self._lock:
                replaced = self._by_identity.get((hello.client_boot, hello.replaces))
            if replaced is not None and not _end([replaced], self.limits.stall_s):
                return handshake.HelloCode.BUSY
        identity = (hello.client_boot, hello.connection_id)
        with self._lock:
            if self._closing.is_set() or identity in self._by_identity:
                return handshake.HelloCode.BUSY
            inbound.identity = identity
            self._by_identity[identity] = inbound
        return handshake.HelloCode.OK

    def take(self, inbound: Inbound) -> bool:
        """From now on the link is not evicted. False: it has been."""
        with self._lock:
            return self._pool.take(inbound)

    def release(self, inbound: Inbound) -> None:
        """From now on the link may be evicted."""
        with self._lock:
            kept = self._pool.release(inbound, time.monotonic())
            if self._waiting:
                self._rested.notify_all()
        if not kept:
            inbound.abort()

    def ended(self, inbound: Inbound) -> None:
        with self._lock:
            self._inbound.discard(inbound)
            self._pool.discard(inbound)
            if self._waiting:
                self._rested.notify_all()
            if inbound.identity is not None:
                self._by_identity.pop(inbound.identity, None)

    def drop(self, client_boot: bytes) -> bool:
        """End all links of that peer. True: nothing it sent before can reach memory any more."""
        with self._lock:
            victims = [one for identity, one in self._by_identity.items() if identity[0] == client_boot]
        return _end(victims, max(self.limits.stall_s, 5.0))

    def count(self, counter: str) -> None:
        with self._meter.lock:
            setattr(self._meter, counter, getattr(self._meter, counter) + 1)

    def served(self, opcode: int, nbytes: int, refused: int) -> None:
        with self._meter.lock:
            self._meter.served(opcode, nbytes, refused)

    @property
    def links(self) -> int:
        return len(self._inbound)

    def close(self) -> None:
        with self._lock:
            self._closing.set()
            self._pool.close()
            inbound = list(self._inbound)
        if self._wake >= 0:
            os.eventfd_write(self._wake, 1)  # read by nobody, so it wakes every acceptor
            for listener, thread in self._listeners:
                thread.join(10.0)
                listener.close()
            self._listeners.clear()
            os.close(self._wake)
            self._wake = -1
        _end(inbound, 10.0)


def _end(links: list[Inbound], timeout_s: float) -> bool:
    """Abort links and wait for their threads; True when all are gone."""
    deadline = time.monotonic() + timeout_s
    for link in links:
        link.abort()
    for link in links:
        link.thread.join(max(0.0, deadline - time.monotonic()))
    return not any(link.thread.is_alive() for link in links)
