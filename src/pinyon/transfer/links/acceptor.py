"""The front door, which listens, authenticates, and hands each accepted link to the service it asks for."""

from __future__ import annotations

import itertools
import logging
import secrets
import socket
import ssl
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from operator import itemgetter
from typing import Protocol

from pinyon.core.address import network_of
from pinyon.core.clock import Clock
from pinyon.transfer.links import handshake
from pinyon.transfer.links.context import EngineContext
from pinyon.transfer.links.stream import DeadlineReached, Stalled, Stream
from pinyon.transfer.links.tls import TlsStream
from pinyon.transfer.types.errors import WireError

_log = logging.getLogger(__name__)
_TLS_RECORD = b"\x16\x03"
"""The beginning of a TLS handshake (RFC 8446, section 5.1: type handshake, version 3.x)."""
REST_S = 4.0
"""Silence after which a link counts as unused, where peers say that they use it (``receive_request``)."""
_turns = itertools.count(1)
_ROOM_LOOKS_S = (0.002, 0.004, 0.008, 0.016, 0.032)
"""Times between looks for a link that rests, before a new one is told BUSY: links poll for a moment after a request."""
_STRANGERS_MIN = 64
"""Links whose handshake is not complete: ``max_inbound`` at a time, but at least so many."""


class LinkService(Protocol):
    """A server of the links of one :class:`pinyon.transfer.links.handshake.Service`."""

    def serve(self, inbound: InboundLink) -> None:
        """Runs in the link's thread until it is idle too long, closed or broken; ``inbound`` is closed afterwards.

        May raise WireError (counted and logged), OSError, Stalled, DeadlineReached. It takes requests by the link's
        ``await_request`` or ``receive_request``: a link that rests between two may be evicted."""
        ...


class InboundLink:
    """One accepted link and its thread."""

    def __init__(self, acceptor: Acceptor, sock: socket.socket) -> None:
        self._acceptor = acceptor
        self._context = context = acceptor.context
        self._sock = sock
        self.aborted = False
        self.resting = 0
        """The turn in which the link came to rest, among all links; 0 while it is in use."""
        limits = self._limits = context.limits
        self.stream = Stream(sock, limits, context.clock)
        self.identity: tuple[bytes, int] | None = None
        """Client boot id and link id, once the handshake is complete."""
        self.marks = handshake.NO_MARKS
        self.thread = threading.Thread(target=self._work, name="pinyon-transfer-in", daemon=True)
        self.on_end: list[Callable[[], None]] = []
        """Calls that undo, at the link's end, what the service did for it (destroy a queue pair, stop a copy).

        They run in the link's thread before anybody who waits for the link's end goes on."""

    def abort(self) -> None:
        """Makes the thread end soon; from any thread."""
        self.aborted = True
        self.stream.abort()

    def await_request(self, window: memoryview) -> int:
        """Receives what comes next into the window; returns the number of bytes.

        It is 0 if the link is closed, was evicted or has been idle for too long. Meanwhile the link rests: it may be
        evicted to make room for another. A request that comes just then is lost. Its initiator sends it again, as after
        any link that ended at rest."""
        self.resting = next(_turns)
        got = self.stream.await_some(window, self._context.clock() + self._limits.idle_s)
        self.resting = 0
        return got

    def receive_request(self, head: memoryview) -> bool:
        """Receives the next request's header. The peer says every second or so that it uses what lives with the link.

        Returns False if the link is closed, was evicted or has been silent for too long."""
        clock = self._context.clock
        give_up = clock() + max(self._limits.idle_s, REST_S)
        while True:
            deadline = give_up if self.resting else min(give_up, clock() + REST_S)
            if got := self.stream.await_some(head, deadline):
                self.stream.receive([head[got:]], deadline)
                self.resting = 0
                return True
            if clock() < deadline or deadline == give_up:
                return False
            self.resting = next(_turns)

    def _work(self) -> None:
        hard = True
        try:
            deadline = self._context.clock() + self._limits.connect_s
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
        """Wraps a tcp stream in TLS if this process has it. Returns False if the peer was refused."""
        tls = self._context.tls
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
            self.stream = secured = TlsStream(self._sock, tls.server, self._limits, self._context.clock)
            if self.aborted:  # ``abort`` came before the line above and hit the old stream
                return False
            try:
                secured.shake_hands(deadline)
            except ssl.SSLError:
                self._acceptor.count("auth_failures")
                raise
            if not secured.peer_has(tls.peer_name):
                self._refuse(deadline)
                return False
        return True

    def _refuse(self, deadline: float) -> None:
        """Refuses the HELLO that is to come: this peer has no business here."""
        self._acceptor.count("auth_failures")
        self.stream.receive_bytes(handshake.HELLO_BYTES, deadline)
        boot = bytes(len(self._context.boot_id))
        refusal = handshake.HelloCode.AUTH, boot, bytes(handshake.NONCE_BYTES), b"", None
        self.stream.send([handshake.pack_hello_reply(*refusal)], deadline)

    def _shake_hands(self, deadline: float) -> LinkService | None:
        acceptor = self._acceptor
        secret, boot_id = self._context.secret, self._context.boot_id
        hello_bytes = self.stream.receive_bytes(handshake.HELLO_BYTES, deadline)
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
            code = acceptor.admit(self, hello)
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
        self.marks = handshake.marks(hello_bytes, reply)
        self.stream.send([reply], deadline)
        if not ok or secret is None:
            return service if ok else None
        proof = self.stream.receive_bytes(handshake.MAC_BYTES, deadline)
        if not handshake.verify_client(secret, hello_bytes, reply, proof):
            code = handshake.HelloCode.AUTH
            acceptor.count("auth_failures")
        else:
            code = acceptor.admit(self, hello)
        self.stream.send([handshake.pack_accept(code)], deadline)
        return service if code is handshake.HelloCode.OK else None


class Acceptor:
    """A listener for up to ``max_inbound`` links on all addresses of the engine.

    A further link evicts the one that has rested longest, or is answered BUSY when all are in use. A link takes its
    place when its handshake is complete. Before that it is a stranger. When there are too many strangers, the oldest of
    the network with most of them goes, so one network cannot keep the others out."""

    def __init__(self, context: EngineContext, services: Mapping[int, LinkService]) -> None:
        self.context = context
        self.services = services
        self._lock = threading.Lock()
        self._strangers: dict[InboundLink, str] = {}
        """Links whose handshake is not complete, the oldest first, with the network that each comes from."""
        self._inbound: set[InboundLink] = set()
        """All links, including evicted ones whose threads have not ended yet."""
        self._by_identity: dict[tuple[bytes, int], InboundLink] = {}
        """Links whose handshake is complete. Those that are not aborted have a place."""
        self._closing = threading.Event()
        self._listeners: list[tuple[socket.socket, threading.Thread]] = []

    def listen(self, host: str, port: int) -> int:
        """Binds a tcp address, starts accepting and returns the port. Raises OSError if the address cannot be had."""
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        listener = socket.create_server((host, port), family=family, backlog=128)
        self._start_accepting(listener)
        return int(listener.getsockname()[1])

    def listen_unix(self, name: str) -> None:
        """Binds an abstract Unix socket (``@...``) and starts accepting. Raises OSError if the name cannot be had.

        The socket is gone with the process, so nothing is to be removed."""
        listener = socket.socket(socket.AF_UNIX, socket.SOCK_STREAM)
        try:
            listener.bind("\0" + name[1:])
            listener.listen(128)
        except BaseException:
            listener.close()
            raise
        self._start_accepting(listener)

    def _start_accepting(self, listener: socket.socket) -> None:
        thread = threading.Thread(target=self._accept, args=(listener,), name="pinyon-transfer-accept", daemon=True)
        self._listeners.append((listener, thread))
        thread.start()

    def _accept(self, listener: socket.socket) -> None:
        while True:
            try:
                sock, _ = listener.accept()
            except OSError as error:  # closing, out of file descriptors, or a peer that left the queue
                if self._closing.wait(0.05):
                    return
                _log.warning("cannot accept a transfer link: %s", error)
            else:
                self._start(sock)

    def _start(self, sock: socket.socket) -> None:
        inbound = oldest = None
        try:
            inbound = InboundLink(self, sock)
            with self._lock:
                if len(self._strangers) >= max(_STRANGERS_MIN, self.context.limits.max_inbound):
                    oldest = self._oldest_stranger()
                    del self._strangers[oldest]
                self._strangers[inbound] = _network(sock)
                self._inbound.add(inbound)
                inbound.thread.start()
        except (OSError, RuntimeError) as error:
            _log.warning("cannot serve a transfer link: %s", error)
            if inbound is not None:
                self.ended(inbound)
            sock.close()
        if oldest is not None:
            oldest.abort()

    def _oldest_stranger(self) -> InboundLink:
        """Returns the oldest stranger of the network that has most of them. Lock held."""
        most = Counter(self._strangers.values()).most_common(1)[0][0]
        return next(each for each, network in self._strangers.items() if network == most)

    def _has_room(self) -> bool:
        """Returns whether there is room for a link, if need be that of one at rest, which is evicted. Lock held."""
        placed = [link for link in self._by_identity.values() if not link.aborted]
        if len(placed) < self.context.limits.max_inbound:
            return True
        resting = [(turn, link) for link in placed if (turn := link.resting)]
        if resting:
            _, victim = min(resting, key=itemgetter(0))
            victim.abort()
        return bool(resting)

    def admit(self, inbound: InboundLink, hello: handshake.Hello) -> handshake.HelloCode:
        """Admits a link whose handshake is complete, after the link that it replaces has ended."""
        if hello.service not in self.services:
            return handshake.HelloCode.NO_SERVICE
        if hello.replaces:
            with self._lock:
                replaced = self._by_identity.get((hello.client_boot, hello.replaces))
            if replaced is not None and not _end([replaced], self.context.limits.stall_s, self.context.clock):
                return handshake.HelloCode.BUSY
        identity = (hello.client_boot, hello.connection_id)
        for pause_s in _ROOM_LOOKS_S:
            with self._lock:
                if identity in self._by_identity or inbound not in self._strangers:  # or nobody waits for it any more
                    break
                if self._has_room():
                    del self._strangers[inbound]
                    inbound.identity = identity
                    self._by_identity[identity] = inbound
                    return handshake.HelloCode.OK
            if self._closing.wait(pause_s):
                break
        return handshake.HelloCode.BUSY

    def ended(self, inbound: InboundLink) -> None:
        with self._lock:
            self._inbound.discard(inbound)
            self._strangers.pop(inbound, None)
            if inbound.identity is not None:
                self._by_identity.pop(inbound.identity, None)

    def count(self, name: str) -> None:
        """Counts one more protocol error or refused identity, by the name of its counter in ``TransferStats``."""
        meter = self.context.meter
        with meter.lock:
            setattr(meter.stats, name, getattr(meter.stats, name) + 1)

    @property
    def links(self) -> int:
        return len(self._inbound)

    def close(self) -> None:
        self._closing.set()
        for listener, _ in self._listeners:
            listener.shutdown(socket.SHUT_RDWR)  # wakes the thread in ``accept``
        for listener, thread in self._listeners:
            thread.join(10.0)
            listener.close()
        self._listeners.clear()
        with self._lock:
            inbound = list(self._inbound)
        _end(inbound, 10.0, self.context.clock)


def _end(links: list[InboundLink], timeout_s: float, clock: Clock) -> bool:
    """Aborts links and waits for their threads; returns whether all are gone."""
    deadline = clock() + timeout_s
    for link in links:
        link.abort()
    for link in links:
        link.thread.join(max(0.0, deadline - clock()))
    return not any(link.thread.is_alive() for link in links)


def _network(sock: socket.socket) -> str:
    """Returns the network a link comes from; empty for a Unix socket of this machine. Raises OSError if it has left."""
    return "" if sock.family == socket.AF_UNIX else network_of(sock.getpeername()[0])
